"""What a reader meets who opens a run for the first time: small windows, odd runs, what is not known, and help."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import rollbook
from rollbook import EID, Experience
from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome, Page
from tests.browser.conftest import measured
from tests.viewer.story import tokenizer

GROUP = "#/group/11%2F7"
SAMPLE = "#/t/11%2F7%2F0%2F0%2Fs"
OPEN = "!document.querySelector('#main[aria-busy]') && !!document.querySelector('#main h1')"


def shown(chrome: Chrome, server: Server) -> Page:
    page = chrome.page()
    page.goto(measured(server).url)
    page.wait(OPEN)
    return page


def go(page: Page, address: str, ready: str) -> None:
    page.eval(f"location.hash = {json.dumps(address)}")
    page.wait(f"({OPEN}) && ({ready})")


@pytest.mark.parametrize("size", [(390, 800), (720, 450), (1024, 700)])
def test_no_page_is_wider_than_its_window(page: Page, size: tuple[int, int]) -> None:
    page.viewport(*size)
    wide = "document.documentElement.scrollWidth - innerWidth"
    for address, ready in (
        ("#/", "!!document.querySelector('.health')"),
        ("#/step/11", "!!document.querySelector('tr[aria-rowindex]')"),
        (GROUP, "!!document.querySelector('.gp-column')"),
        (SAMPLE, "!!document.querySelector('.tk-pane')"),
        ("#/samples", "!!document.querySelector('tr[aria-rowindex]')"),
    ):
        go(page, address, ready)
        assert page.eval(wide) <= 0, address


def test_a_narrow_window_shows_the_text_of_a_sample(page: Page) -> None:
    page.viewport(390, 800)
    go(page, SAMPLE, "!!document.querySelector('.tk-pane')")
    assert page.eval("document.querySelector('.tk-pane').getBoundingClientRect().height") > 300
    assert page.eval("document.querySelector('.tp-aside').getBoundingClientRect().height") > 100


def test_what_was_not_recorded_is_no_share_of_zero(chrome: Chrome, tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "bare", tokenizer=tokenizer()) as book:
        ids = tokenizer().encode("What is 3 times 4? 12").ids
        book.append([Experience(eid=EID(batch=0, task=0, run=0), tokens=ids, prompt_length=4)])
    with Server(tmp_path / "bare", port=0) as server:
        page = shown(chrome, server)
        health = dict(
            page.eval(
                "[...document.querySelectorAll('.health-item')]"
                ".map(e => [e.querySelector('.name').textContent, e.querySelector('.value').textContent])"
            )
        )
        assert [health[name] for name in ("Zero-variance groups", "Groups solved", "Stale > 1")] == ["–", "–", "–"]
        assert (health["Truncated"], health["Masked tokens"]) == ("0%", "0%")
        page.wait("document.querySelector('.findings').innerText.includes('Most checks need more samples')")
        assert "Compare start and end" not in page.text()
        go(page, "#/step/0", "!!document.querySelector('tr[aria-rowindex]')")
        assert "zero variance" not in page.text(".step-title") and "truncated 0%" in page.text(".step-title")
        page.eval("location.hash = document.querySelector('tr[aria-rowindex] a').getAttribute('href')")
        page.wait("!!document.querySelector('.gp-column')")
        page.eval("location.hash = document.querySelector('.gp-column-head h2 a').getAttribute('href')")
        page.wait("!!document.querySelector('.tk-pane')")
        assert page.count(".tp-strips > *") == 1, "without numbers there is no curve of them"
        assert page.problems == []


def test_files_that_were_not_read_are_named_on_the_overview(chrome: Chrome, tmp_path: Path) -> None:
    rows = [
        {"input": "2 + 3 ?", "output": "5", "score": 1.0, "step": 1},
        {"input": "2 + 3 ?", "output": "6", "score": 0},
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "2.jsonl").write_text('{"input": <img src=x onerror="window.__pwn=1">\n')
    with Server(tmp_path, port=0) as server:
        page = shown(chrome, server)
        assert "1 problem" in page.text(".notice summary")
        assert page.text(".notice li").startswith("2.jsonl: not read")
        assert page.count("img") == 0 and page.problems == []


def test_a_run_that_was_read_whole_says_nothing_of_problems(page: Page) -> None:
    assert page.count(".notice") == 0
    changed = "[...document.querySelectorAll('a')].find(a => a.textContent.startsWith('Compare start'))?.hash"
    assert page.eval(changed) == "#/compare?a=0-2&b=9-11"


def test_the_cells_of_a_large_group_are_a_fair_picture_of_it(chrome: Chrome, tmp_path: Path) -> None:
    ids = np.array(tokenizer().encode("What is 3 times 4? 12").ids, np.int32)
    with rollbook.open(tmp_path / "large", tokenizer=tokenizer()) as book:
        book.append(
            [
                Experience(eid=EID(batch=0, task=0, run=run), tokens=ids, prompt_length=4, reward=float(run < 20))
                for run in range(64)
            ]
        )
    with Server(tmp_path / "large", port=0) as server:
        page = shown(chrome, server)
        go(page, "#/step/0", "!!document.querySelector('tr[aria-rowindex] .cells')")
        kinds = page.eval("[...document.querySelectorAll('tr[aria-rowindex] .cell')].map(e => e.className)")
        assert len(kinds) == 16 and kinds.count("cell r4") == 5 and kinds[-1] == "cell r0"
        assert "16 of 64" in page.eval("document.querySelector('.cells').getAttribute('aria-label')")


def test_the_list_of_keys_names_each_key_once(page: Page) -> None:
    go(page, "#/step/11", "!!document.querySelector('tr[aria-rowindex]')")
    page.key("?")
    page.wait("!!document.querySelector('dialog[open]')")
    keys = page.texts("dialog[open] dt")
    assert len(keys) == len(set(keys)) and ":" in keys
    assert "filter" in page.text("dialog[open]") and "SQL" not in page.text("dialog[open]")
    page.key("Escape")


def test_the_filter_explains_itself_and_gives_the_focus_on(page: Page) -> None:
    go(page, "#/samples", "!!document.querySelector('tr[aria-rowindex]')")
    page.click(".filter button[aria-label='Filter syntax']")
    page.wait("!!document.querySelector('dialog[open]')")
    names = page.texts("dialog[open] tbody th")
    assert {"reward", "truncated", "kl_max"} <= set(names)
    page.key("Escape")
    page.wait("!document.querySelector('dialog')")
    page.eval("document.querySelector('.filter input').focus()")
    page.wait("!document.querySelector('.suggestions').hidden")
    page.key("Tab")
    assert page.eval("document.activeElement.getAttribute('aria-label')") == "Filter syntax"


def test_headings_leave_no_level_out(page: Page) -> None:
    levels = "[...document.querySelectorAll('h1, h2, h3')].filter(e => e.offsetParent).map(e => Number(e.tagName[1]))"
    for address, ready in (
        (GROUP, "!!document.querySelector('.gp-column')"),
        (SAMPLE, "!!document.querySelector('.tk-pane')"),
        ("#/step/11", "!!document.querySelector('tr[aria-rowindex]')"),
    ):
        go(page, address, ready)
        headings = page.eval(levels)
        assert headings[0] == 1 and headings.count(1) == 1 and 2 in headings
        assert all(after - before <= 1 for before, after in pairwise(headings)), address


def test_the_overview_does_not_wait_for_the_doctor_and_evaluations_have_their_own(
    chrome: Chrome, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = server.api.answers  # type: ignore[union-attr]
    free = threading.Event()
    real = answers.findings

    def slow(evaluation: bool = False) -> dict[str, Any]:
        free.wait(20)
        return real(evaluation)

    monkeypatch.setattr(answers, "findings", slow)
    page = chrome.page()
    page.goto(server.url)
    page.wait("document.querySelectorAll('table[aria-label=Steps] tr[aria-rowindex]').length > 0")
    assert "Running checks" in page.text(".findings")
    free.set()
    page.wait("document.querySelectorAll('.finding-title').length > 0")
    assert page.eval("document.querySelector('.live').dataset.state") == "live"
    page.click("#main .segmented button:last-child")
    page.wait(
        "location.hash.includes('evaluation=1') && "
        "/No findings|Open/.test(document.querySelector('.findings')?.innerText)"
    )
    assert any("/api/findings?evaluation=1" in url for url in page.requests)
    titles = [item["title"] for item in real(evaluation=True)["items"]]
    assert page.texts(".finding-title") == titles[:6]
    assert page.problems == []
    page.close()


def test_notes_are_written_and_a_run_that_stands_still_is_not_live(chrome: Chrome, tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "run", tokenizer=tokenizer()) as book:
        ids = tokenizer().encode("What is 3 times 4? 12").ids
        book.append([Experience(eid=EID(batch=0, task=0, run=run), tokens=ids, prompt_length=4) for run in range(2)])
        with book.ledger.write() as tx:
            tx.run("UPDATE events SET time = time - 3600")
    with Server(tmp_path / "run", port=0, annotate=True) as server:
        uid = server.api.answers.list()["rows"][0]["uid"]  # type: ignore[union-attr]
        page = chrome.page()
        page.goto(server.url)
        page.wait("document.querySelector('.live')?.dataset.state === 'idle'")
        assert "last change 1 h ago" in page.eval("document.querySelector('.live').title")
        assert page.eval("document.querySelector('.live .dot').getAnimations().length") == 0
        page.eval(f"location.hash = '#/t/{quote(uid, safe='')}'")
        page.wait("!!document.querySelector('.tp-note')")
        page.key("w")
        page.type("reads the answer aloud")
        page.eval("document.querySelector('.tp-detail button').click()")
        page.wait("document.querySelector('.tp-detail').innerText.includes('saved')")
        assert server.api.notes()[uid]["note"] == "reads the answer aloud"  # type: ignore[union-attr]
        page.eval("document.querySelector('.tp-note').blur()")
        page.key("*")
        page.reload()
        page.wait("document.querySelector('.tp-note')?.value === 'reads the answer aloud'")
        assert server.api.notes()[uid]["star"] and page.count(".starred") == 1  # type: ignore[union-attr]
        page.eval("location.hash = '#/samples'")
        page.wait("[...document.querySelectorAll('.flags .chip')].some(e => e.innerText === 'note')")
        assert page.problems == []
        page.close()
