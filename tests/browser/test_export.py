"""The single HTML file, opened from disk without a network: the same pages, keys and lenses; what is hidden is gone."""

from __future__ import annotations

import base64
import gzip
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rollbook.inspect.html_export import write_html
from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome, Page
from tests.browser.conftest import RUNS
from tests.viewer import story

GID = "1/4"
"""A group with a picture, tools and two turns."""


def opened(chrome: Chrome, server: Server, file: Path, **options: Any) -> Page:
    """A file as a reader opens it who has no network."""
    api = server.api
    written = write_html(file, api.source, api.answers, **options)  # type: ignore[union-attr]
    assert file.stat().st_size == written.size
    page = chrome.page()
    page.offline()
    page.goto(file.as_uri())
    page.wait("document.querySelectorAll('.tk-chunk, tr[aria-rowindex], .failure').length > 0")
    return page


def finished(page: Page, file: Path) -> None:
    requests = [url for url in page.requests if not url.startswith("data:image/png;")]  # a picture inside the file
    assert requests == [file.as_uri()]  # the file, and nothing else, all the time
    assert page.problems == [] and page.dialogs == 0
    page.close()


def test_a_group_is_as_on_the_server(chrome: Chrome, server: Server, page: Page, tmp_path: Path) -> None:
    file = tmp_path / "group.html"
    alone = opened(chrome, server, file, gid=GID)
    assert alone.hash() == "#/group/" + quote(GID, safe="")
    assert "saved file" in alone.text("header").lower()
    assert alone.count(".pages a") == 0 and alone.eval("document.querySelector('.search-form').hidden")
    page.eval(f"location.hash = {json.dumps('#/group/' + quote(GID, safe=''))}")
    page.wait("document.querySelectorAll('.tk-chunk').length > 0")
    chunks = "[...document.querySelectorAll('.tk-chunk')].map(c => c.textContent)"
    assert alone.eval(chunks) == page.eval(chunks)
    assert alone.eval("[...document.querySelectorAll('img')].every(i => i.src.startsWith('data:image/'))")
    before = alone.eval(
        "document.querySelector('.tk-pane').className + document.querySelectorAll('.tk-chunk span').length"
    )
    alone.key("2")
    alone.wait("location.hash.includes('lens=')")
    assert alone.hash().split("?")[1] == "lens=logprob"
    alone.wait(
        "document.querySelector('.tk-pane').className + document.querySelectorAll('.tk-chunk span')"
        f".length !== {json.dumps(before)}"
    )
    alone.key("?")
    alone.wait("!!document.querySelector('dialog[open]')")
    assert "search prompts" not in alone.text("dialog")
    finished(alone, file)


def test_a_sample_has_its_views_lenses_and_cursor(chrome: Chrome, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "sample.html"
    uid = f"{GID}/1/0/s"
    page = opened(chrome, server, file, uids=[uid])
    sample = server.api.source.trajectories([uid])[0]  # type: ignore[union-attr]
    assert page.hash() == "#/t/" + quote(uid, safe="")
    page.key("l", "l")
    at = int(re.search(r"at=(\d+)", page.hash())[1])  # type: ignore[index]
    page.wait(f"document.querySelector('.ti-title').innerText.startsWith('Token #{at} ')")
    page.eval(f"location.hash = {json.dumps(page.hash().split('?')[0] + f'?lens=entropy&at={sample.prompt_tokens}')}")
    page.wait(f"document.querySelector('.ti-title')?.innerText.startsWith('Token #{sample.prompt_tokens} ')")
    entropy = float(sample.arrays["entropy"][sample.prompt_tokens])
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", page.text(".tp-aside"))]
    assert any(abs(number - entropy) < 2e-3 + entropy * 2e-3 for number in numbers)  # half floats in the file
    page.key("J")
    page.wait("!!document.querySelector('.tp-left .json-line')")
    assert uid in page.eval("document.querySelector('.tp-left .json').textContent")
    page.key("J")
    page.wait("!!document.querySelector('.tk-chunk')")
    page.key("t")  # themes work without storage or server
    assert page.eval("document.documentElement.dataset.theme") == "light"
    finished(page, file)


def test_a_query_lists_its_samples_and_walks_through_them(chrome: Chrome, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "query.html"
    page = opened(chrome, server, file, filter="step <= 1 and reward > 0.5 and not evaluation")
    expected = sorted(
        (row for step in (0, 1) for row in story.rollout(step, 4, RUNS) if (row.reward or 0) > 0.5),
        key=lambda row: row.eid.uid,
    )
    assert page.hash() == "#/samples"
    assert page.wait(f"document.querySelectorAll('tr[aria-rowindex]').length === {len(expected)}")
    page.key("j", "Enter")
    page.wait("location.hash.startsWith('#/t/') && !!document.querySelector('.tk-chunk')")
    page.eval("history.back()")
    page.wait(f"document.querySelectorAll('tr[aria-rowindex]').length === {len(expected)}")
    finished(page, file)


def test_what_is_not_in_the_file_says_so(chrome: Chrome, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "small.html"
    page = opened(chrome, server, file, gid=GID)
    for address in (
        "#/",
        "#/step/1",
        "#/t/2%2F8%2F0%2F0%2Fs",
        "#/group/2%2F8",
        "#/search?q=x",
        "#/compare",
        "#/sql",
        "#/prompt/0123456789abcdef",
    ):
        page.eval(f"document.querySelector('#main').replaceChildren(); location.hash = {json.dumps(address)}")
        page.wait("document.querySelector('#main')?.innerText.includes('not in this file')")
    finished(page, file)


def test_what_is_redacted_is_in_no_part_of_the_file(chrome: Chrome, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "redacted.html"
    word = " ".join(story.question(4)[0].split()[:2])  # who buys the boxes
    page = opened(chrome, server, file, gid=GID, redact=[word])
    packed = re.search(rb'id="bundle">([^<]*)<', file.read_bytes())
    assert packed is not None
    text = gzip.decompress(base64.b64decode(packed[1])).decode()
    bundle = text + base64.b64decode(json.loads(text)["frame"]).decode("latin-1")
    assert word not in bundle and word not in file.read_text()
    assert "█" * len(word) + " 15 boxes" in page.text("#main")
    assert word not in page.eval("document.documentElement.textContent")
    page.eval(f"location.hash = {json.dumps('#/t/' + quote(GID + '/0/0/s', safe='') + '?view=json')}")
    page.wait("!!document.querySelector('.tp-left .json-line')")
    assert word not in page.text("#main") and "█" * len(word) in page.eval(
        "document.querySelector('.tp-left .json').textContent"
    )
    finished(page, file)


@pytest.mark.parametrize("images", [True, False])
def test_the_file_is_small(chrome: Chrome, server: Server, tmp_path: Path, images: bool) -> None:
    file = tmp_path / f"{images}.html"
    page = opened(chrome, server, file, gid=GID, images=images)
    assert file.stat().st_size < 400_000  # all the pages' code, and four short samples
    assert (page.count("img") > 0) is images
    finished(page, file)


def test_the_dialog_saves_a_file_that_opens(page: Page, chrome: Chrome, server: Server, tmp_path: Path) -> None:
    chrome.call(
        "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), browserContextId=page._context
    )
    page.eval(f"location.hash = {json.dumps('#/group/' + quote(GID, safe=''))}")
    page.wait("!!document.querySelector('.tk-chunk')")
    page.key("e")
    page.wait("!!document.querySelector('dialog[open] form')")
    page.click("dialog button[type=submit]")
    page.wait("document.querySelector('.toast')?.innerText.startsWith('saved rollbook-group-')")
    file = next(iter(saved(tmp_path)))
    other = chrome.page()
    other.offline()
    other.goto(file.as_uri())
    other.wait("!!document.querySelector('.tk-chunk')")
    finished(other, file)


def saved(folder: Path) -> list[Path]:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        files = [file for file in folder.glob("rollbook-group-*.html") if file.stat().st_size]
        if files:
            return files
        time.sleep(0.02)
    raise AssertionError("nothing was saved")
