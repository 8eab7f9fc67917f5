"""What the browser tests share: one book and one browser a worker, one server and one tab a module."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.inspect.server import Server
from tests import apt
from tests.browser.chrome import BrowserError, Chrome, Page, find
from tests.viewer import story

STEPS, GROUPS, RUNS = 12, 4, 4


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A story of a few steps, which no test changes."""
    return story.make(tmp_path_factory.mktemp("run") / "story", steps=STEPS, groups=GROUPS, runs=RUNS)


@pytest.fixture(scope="session")
def chrome() -> Iterator[Chrome]:
    try:
        find()
    except BrowserError as error:
        if apt.apt_allowed():
            raise
        pytest.skip(str(error))
    with Chrome() as browser:
        yield browser


def measured(server: Server, records: int | None = None) -> Server:
    """The server, once it has looked at every sample (and has so many of them)."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        run = server.api.answers.run()  # type: ignore[union-attr]
        enough = run["records"] > 0 if records is None else run["records"] >= records
        if enough and run["progress"]["measured"] == run["progress"]["total"]:
            return server
        time.sleep(0.02)
    raise AssertionError("the samples were never all measured")


@pytest.fixture(scope="module")
def server(book: str) -> Iterator[Server]:
    with Server(book, port=0) as started:
        yield measured(started)


@pytest.fixture(scope="module")
def tab(chrome: Chrome, server: Server) -> Iterator[Page]:
    """A tab that has traded the token of the address."""
    page = chrome.page()
    page.goto(server.url)
    yield page
    page.close()


@pytest.fixture
def page(tab: Page, server: Server) -> Iterator[Page]:
    """A tab that shows the overview as if for the first time; at the end nothing may have gone wrong in it."""
    tab.viewport(1440, 900)
    tab.media(dark=False)
    tab.wait_until_idle()
    tab.requests.clear()
    tab.problems.clear()
    tab.eval(
        "localStorage.clear(); delete document.documentElement.dataset.theme;"
        "document.documentElement.dataset.palette = 'default'; CSS.highlights.clear();"
        "document.querySelectorAll('dialog').forEach(d => d.close()); document.querySelector('.brand')?.click()"
    )
    tab.wait("document.querySelectorAll('table[aria-label=Steps] tr[aria-rowindex]').length > 0")
    tab.wait(
        "!document.querySelector('.findings').innerText.includes('Running checks')"
    )  # what comes moves what is below
    yield tab
    assert tab.problems == []


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Server]:
    """A server of a book that a test may add to."""
    with Server(story.make(tmp_path / "growing", steps=3, groups=GROUPS, runs=RUNS), port=0) as started:
        yield measured(started)
