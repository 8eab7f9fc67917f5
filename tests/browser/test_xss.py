"""Hostile texts in every place that data can be, on every page and in the export: they are shown, and nothing acts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rollbook.inspect.html_export import write_html
from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome, Page
from tests.browser.conftest import measured
from tests.browser.hostile import FOLDER, PAYLOADS, SHOWN, go, make

# What no page of ours has: elements and attributes that only a text taken for markup could have made.
ALIEN = """(() => {
  const found = [];
  const never = new Set(('iframe object embed base video audio source marquee math animate use template portal frame '
    + 'applet').split(' '));
  const pictures = /^(\\/?static\\/|\\/?api\\/media\\/|data:image\\/(png|jpeg|gif|webp);|blob:)/;
  for (const node of document.querySelectorAll('*')) {
    const tag = node.localName;
    const head = document.head.contains(node);
    const tell = (...words) => found.push([tag, ...words].join(' ').slice(0, 120));
    if (never.has(tag) || /[^a-z0-9]/i.test(tag)) tell();
    if (!head && (['meta', 'link', 'style'].includes(tag) || (tag === 'title' && !node.ownerSVGElement))) tell();
    if (tag === 'script' && !/^(\\/?static\\/main\\.js)?$/.test(node.getAttribute('src') ?? '')) tell();
    for (const { name, value } of node.attributes) {
      if (/^on|^srcdoc$|^action$|^formaction$/.test(name)) tell(name);
      if (!/^[a-zA-Z][a-zA-Z:-]*[0-9]?$/.test(name)) tell(name);
      const leads = !head && !node.download && ['href', 'xlink:href'].includes(name);
      if (leads && !/^#(\\/|main$)/.test(value)) tell(value);
      if (name === 'src' && !pictures.test(value)) tell(value);
      if (['class', 'id'].includes(name) && /[<>(){}'"=:;]/.test(value)) tell(name, value);
    }
  }
  return found;
})()"""


ADDRESSED = [
    "mode",
    "step",
    "limit",
    "filter",
    "sort",
    "view",
    "at",
    "lens",
    "lo",
    "hi",
    "mask",
    "fold",
    "zoom",
    "side",
    "ua",
    "ub",
    "pick",
    "phrases",
    "tables",
    "part",
    "gap",
    "findings",
    "evaluation",
    "sync",
    "cols",
    "diff",
]
"""Parameters that pages read."""


def harms(page: Page, origin: str) -> list[str]:
    """What went wrong in a page since it was last asked."""
    noticed = []
    if page.eval("window.__pwn") is not None:
        noticed.append("a text ran")
    if page.eval(
        "({}).polluted !== undefined || Object.keys(Object.prototype).length > 0 || typeof ({}).toString !== 'function'"
    ):
        noticed.append("every object has changed")
    noticed += page.eval(ALIEN)
    noticed += [url for url in page.requests if not url.startswith((origin, "data:image/svg+xml,%3Csvg"))]
    noticed += ["a dialog"] * page.dialogs
    noticed += page.problems
    page.requests.clear()
    page.problems.clear()
    return noticed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(make(tmp_path_factory.mktemp("hostile")), port=0, annotate=True) as started:
        yield measured(started)


def origin(server: Server) -> str:
    return server.url.split("/#")[0]


@pytest.fixture(scope="module")
def rows(server: Server) -> list[dict[str, Any]]:
    return list(server.api.answers.list(view="samples", limit=200)["rows"])  # type: ignore[union-attr]


def path(*parts: str) -> str:
    return "#/" + "/".join(quote(part, safe="") for part in parts)


@pytest.mark.parametrize(
    ("html", "noticed"),
    [
        ("<script>window.__pwn=1</script>", "a text ran"),
        ("<img src=x onerror=window.__pwn=1>", "img onerror"),
        ("<img src=http://attacker.invalid/x.png>", "http://attacker.invalid/x.png"),
        ("<script>setTimeout(() => alert(1))</script>", "a dialog"),
        ("<script>Object.prototype.polluted = 1</script>", "every object has changed"),
        ("<a href=javascript:0>x</a>", "a javascript:0"),
        ("<script>throw new Error('thrown')</script>", "Error: thrown"),
        (
            "<meta http-equiv=Content-Security-Policy content=\"script-src 'none'\"><script>1</script>",
            "Content Security Policy",
        ),
    ],
)
def test_control_a_page_that_runs_them_is_noticed(chrome: Chrome, html: str, noticed: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"<!doctype html><body>{html}</body>")
    page = chrome.page()
    page.offline()
    page.call("Page.navigate", url=(tmp_path / "page.html").as_uri())
    if "alert" in html:
        chrome.wait_for(lambda: page.dialogs > 0, "the dialog")
        page.call("Page.handleJavaScriptDialog", accept=True)
    page.wait("document.readyState === 'complete'")
    harms_seen = harms(page, (tmp_path / "page.html").as_uri())
    assert any(noticed in harm for harm in harms_seen), harms_seen
    page.close()


def test_there_are_enough_of_them() -> None:
    assert len(PAYLOADS) == len(set(PAYLOADS)) >= 40


def test_overview_steps_and_samples(page: Page, server: Server) -> None:
    assert FOLDER in page.text(".brand")
    page.eval(
        "(() => { const s = document.querySelector('.cards select'); s.value = '*'; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    page.wait("document.querySelectorAll('.chart-note .key-line').length > 0")
    assert SHOWN in page.text(".cards")
    assert harms(page, origin(server)) == []
    for address in (
        "#/step/0",
        "#/step/0?view=samples",
        "#/step/1",
        "#/samples",
        "#/samples?view=groups",
        "#/step/2?view=samples&sort=-reward",
    ):
        go(page, address, "tr[aria-rowindex]")
        page.eval("window.scrollTo(0, 600)")
        page.key("j", " ")  # peek
        assert harms(page, origin(server)) == [], address
    go(page, "#/step/0", "tr[aria-rowindex]")
    page.wait(f"document.querySelector('main').innerText.includes({json.dumps(SHOWN)})")
    page.key("?")
    page.wait("!!document.querySelector('dialog[open]')")
    assert harms(page, origin(server)) == []


def test_every_payload_alone_in_every_single_place(page: Page, server: Server, rows: list[dict[str, Any]]) -> None:
    alone = [row for row in rows if row["step"] == 0]
    assert len(alone) == len(PAYLOADS)
    for i, row in enumerate(alone):
        go(page, path("t", row["uid"]) + ("?view=json" if i % 4 == 3 else ""), ".tp-head")
        page.wait("!!document.querySelector('.tk-chunk, .tp-left .json')")
        if i % 4 == 1:
            go(page, path("group", row["gid"]), ".tk-chunk")
        assert harms(page, origin(server)) == [], PAYLOADS[i]


def test_all_payloads_in_every_view_of_a_trajectory(page: Page, server: Server) -> None:
    for view, ready in (
        ("chat", ".tk-chunk"),
        ("raw", ".tk-chunk"),
        ("json", ".tp-left .json"),
        ("ledger", ".ledger-line"),
    ):
        go(page, path("t", "1/every/1/0/s") + "?view=" + view + "&lens=entropy&at=70&q=%3Cscript", ready)
        if view == "json":
            page.eval("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert SHOWN in page.eval("document.querySelector('.tp-left').textContent"), view
        assert harms(page, origin(server)) == [], view
    page.key("d", "*")
    page.wait("!!document.querySelector('dialog[open]') || location.hash.startsWith('#/group')")
    assert harms(page, origin(server)) == []


def test_all_payloads_on_the_group_page(page: Page, server: Server) -> None:
    go(page, path("group", "1/every"), ".tk-chunk")
    assert SHOWN in page.text("#main")
    assert harms(page, origin(server)) == []
    for keys in (["d"], ["d", "f"], ["1"], ["s"], ["m"]):
        page.key(*keys)
        assert harms(page, origin(server)) == [], keys


def test_all_payloads_on_the_prompt_and_the_compare_page(
    page: Page, server: Server, rows: list[dict[str, Any]]
) -> None:
    every = next(row for row in rows if row["step"] == 1)
    go(page, path("prompt", every["prompt"]), ".diff-view, .prompt-diff .empty-state")
    assert SHOWN in page.text("#main")
    assert harms(page, origin(server)) == []
    go(page, "#/compare?a=0-0&b=1-3", ".compare-plots svg")
    assert SHOWN in page.text("section[aria-label='Parts of the reward']")
    page.wait("!!document.querySelector('.compare-strip svg')")
    assert harms(page, origin(server)) == []
    go(page, "#/metrics?q=script", ".chart canvas")
    assert SHOWN in page.texts("#main figure.chart h2")
    assert harms(page, origin(server)) == []


def test_payloads_as_searches_and_in_what_they_find(page: Page, server: Server) -> None:
    go(page, "#/search?q=script", ".hit")
    assert harms(page, origin(server)) == []
    for i, payload in enumerate(PAYLOADS):
        mode = "phrase" if i % 5 == 0 else "substring"
        if mode == "substring" and i % 3:
            continue  # a search starts a process: some of them are enough
        go(page, f"#/search?q={quote(payload[:900], safe='')}&mode={mode}", ".hit, [role=alert]")
        assert page.eval("document.querySelector('.search-page input').value") == payload[:900]
        assert harms(page, origin(server)) == [], payload


def test_payloads_as_queries_columns_and_values(page: Page, server: Server) -> None:
    words = ", ".join(
        f"""'{p.replace("'", "''")}' as "{p.replace('"', '""')[:60]} {i}" """
        for i, p in enumerate(PAYLOADS)
        if "\0" not in p
    )
    go(page, f"#/sql?q={quote('select uid, gid, ' + words + ', info, messages from experiences', safe='')}", ".sql-box")
    assert harms(page, origin(server)) == []
    page.click(".sql-edit .primary")
    page.wait("document.querySelectorAll('.plain-grid tbody tr').length > 0")
    assert SHOWN in page.text(".plain-grid")
    page.eval("document.querySelectorAll('.sql-long').forEach(b => b.click())")
    assert harms(page, origin(server)) == []
    page.eval(
        "(() => { const b = document.querySelector('.sql-box'); "
        "b.value = 'select <img src=x onerror=window.__pwn=1>'; })()"
    )
    page.click(".sql-edit .primary")
    page.wait("!!document.querySelector('.sql-error')")
    assert [harm for harm in harms(page, origin(server)) if "/api/sql" not in harm] == []


def test_payloads_in_addresses(page: Page, server: Server, rows: list[dict[str, Any]]) -> None:
    places = [
        "",
        "nowhere",
        "step/1",
        "group/1%2Fevery",
        "t/1%2Fevery%2F0%2F0%2Fs",
        "samples",
        "search",
        "sql",
        "compare",
        f"prompt/{rows[-1]['prompt']}",
    ]
    names = ["a", "b", "q", *ADDRESSED]
    for i, place in enumerate(places * 2):
        payload = PAYLOADS[(i * 7) % len(PAYLOADS)][:200]
        parameters = "&".join(f"{name}={quote(payload, safe='')}" for name in names)
        go(page, f"#/{place}?{parameters}", "#main h1")
        harms_seen = harms(page, origin(server))
        assert [
            harm for harm in harms_seen if not ("Failed to load resource" in harm and "status of 40" in harm)
        ] == [], (
            place,
            payload,
        )
    for payload in PAYLOADS[::6]:
        for kind in ("", "t/", "group/", "step/", "prompt/"):
            go(page, "#/" + kind + quote(payload, safe=""), "#main h1")
        assert [harm for harm in harms(page, origin(server)) if "status of 40" not in harm] == [], payload


def test_a_file_with_such_a_name_and_such_lines(chrome: Chrome, tmp_path: Path) -> None:
    file = tmp_path / (FOLDER.replace("/", "") + ".jsonl")
    lines = [
        {
            "messages": [
                {"role": payload[:40], "content": payload},
                {"role": "assistant", "content": payload, "name": payload},
            ],
            "reward": i / 9,
            payload: payload,
            "id": payload,
        }
        for i, payload in enumerate(PAYLOADS)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Server(file, port=0) as server:
        measured(server, len(PAYLOADS))
        uid = server.api.answers.list(view="samples")["rows"][0]["uid"]  # type: ignore[union-attr]
        page = chrome.page()
        page.goto(server.url)
        page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 0")
        assert "<img src=x onerror" in page.text(".brand")
        go(page, "#/samples", "tr[aria-rowindex]")
        assert harms(page, origin(server)) == []
        for view in ("chat", "raw", "json"):
            go(page, path("t", uid) + "?view=" + view, ".tk-chunk, .tp-left .json")
            assert harms(page, origin(server)) == []
        page.close()


@pytest.mark.parametrize("kind", ["group", "sample", "query"])
def test_the_export_opened_from_disk_without_a_network(
    chrome: Chrome, server: Server, tmp_path: Path, kind: str
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "group": {"gid": "1/every"},
        "sample": {"uids": ["2/every/0/0/s"]},
        "query": {"filter": "step <= 1"},
    }
    chosen = ways[kind]
    file = tmp_path / "<img src=x onerror=window.__pwn=1>.html"
    api = server.api
    write_html(file, api.source, api.answers, title="</title><script>window.__pwn=1</script>", **chosen)  # type: ignore[union-attr]
    assert b"__pwn" not in file.read_bytes().replace(b"&lt;/title&gt;&lt;script&gt;window.__pwn=1&lt;/script&gt;", b"")
    page = chrome.page()
    page.offline()
    page.goto(file.as_uri())
    page.wait("document.querySelectorAll('.tk-chunk, tr[aria-rowindex]').length > 0")
    if kind == "query":
        assert page.hash() == "#/samples"
        page.wait(f"document.querySelector('main').innerText.includes({json.dumps(SHOWN)})")
    uid = "2/every/0/0/s" if kind == "sample" else "1/every/0/0/s"
    for view in ("chat", "raw", "json"):
        go(page, path("t", uid) + "?view=" + view, ".tk-chunk, .tp-left .json")
        assert SHOWN in page.eval("document.querySelector('#main').textContent")
    if kind != "sample":
        go(page, path("group", "1/every"), ".tk-chunk")
        page.key("d", "1", "m")
    page.eval("fetch('http://attacker.invalid/').catch(() => 0)")
    blocked = [problem for problem in page.problems if "attacker.invalid" in problem]
    assert blocked, "what is asked for from here is refused by the policy"
    page.problems[:] = [problem for problem in page.problems if "attacker.invalid" not in problem]
    assert [problem for problem in page.requests if not problem.startswith("http://attacker.invalid")] == [
        file.as_uri()
    ]
    page.requests.clear()
    assert harms(page, file.as_uri()) == []
    page.close()
