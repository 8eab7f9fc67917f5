"""A viewer that is open while another process adds records: pages follow without a reload and ask for news alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome, Page
from tests.browser.conftest import GROUPS, RUNS, measured

WRITER = """
import random, sys
import rollbook
from tests.viewer import story
with rollbook.open(sys.argv[1], tokenizer=story.tokenizer()) as book:
    for line in sys.stdin:
        what, step = line.split()
        if what == "step":
            story.more(book, int(step), {groups}, {runs})
        else:
            task = 900 + int(step)
            book.append([story.sample(int(step), task, run, 2, 0.5, random.Random(run)) for run in range(2)])
        print("done", flush=True)
"""


class Writer:
    """A process of its own that adds to a book, a step or a group at a time."""

    def __init__(self, path: str) -> None:
        script = WRITER.format(groups=GROUPS, runs=RUNS)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def add(self, kind: str, step: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{kind} {step}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture
def live(chrome: Chrome, growing: Server) -> Page:
    page = chrome.page()
    page.goto(growing.url)
    page.wait("document.querySelectorAll('table[aria-label=Steps] tr[aria-rowindex]').length === 3")
    page.wait("document.querySelector('.live').dataset.state === 'live'")
    page.eval("window.__same = true")  # a reload would lose it
    return page


def test_pages_follow_a_run_that_another_process_writes(live: Page, growing: Server, tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "growing"))
    try:
        overview(live, writer)
        step(live, writer, growing)
    finally:
        writer.close()
        problems = live.problems
        live.close()
    assert problems == []


def overview(page: Page, writer: Writer) -> None:
    page.eval("window.scrollTo(0, document.body.scrollHeight)")
    page.key("j", "j")
    focus = "document.activeElement.cells?.[0].innerText"
    assert page.eval(focus) == "1"
    place = page.eval("Math.round(document.activeElement.getBoundingClientRect().top)")
    page.requests.clear()
    for new in (3, 4):
        writer.add("step", new)
        page.wait(
            "[...document.querySelectorAll('table[aria-label=Steps] tr[aria-rowindex]')].some(r => r.cells[0]"
            f".innerText === '{new}')"
        )
    page.wait("document.querySelector('.facts').innerText.includes('step 4')")
    assert page.eval(focus) == "1"  # the row that had the focus has it
    assert (
        abs(page.eval("Math.round(document.activeElement.getBoundingClientRect().top)") - place) <= 2
    )  # and it did not move
    assert page.eval("window.__same") is True
    calls = [url.split("/api/")[1] for url in page.requests if "/api/" in url]
    assert any(url.startswith("steps?") for url in calls)
    assert [url for url in calls if url.startswith("steps") and "since=" not in url] == []  # only what is new
    assert [url for url in calls if url.split("?")[0] not in ("steps", "run", "findings", "events")] == []


def step(page: Page, writer: Writer, server: Server) -> None:
    page.eval("location.hash = '#/step/4'")
    page.wait(
        "document.querySelectorAll('tr[aria-rowindex]').length > 0 && document.querySelector('h1')"
        ".innerText.includes('Step 4')"
    )
    page.key("j", "j")
    row = page.eval("document.activeElement.innerText")
    scroll = page.eval("window.scrollY")
    page.requests.clear()
    writer.add("group", 4)
    measured(server, (5 * GROUPS * RUNS) + 2)
    page.wait(f"document.querySelector('main').innerText.includes('{GROUPS * RUNS + 2} samples')")
    assert page.eval("document.activeElement.innerText") == row and page.eval("window.scrollY") == scroll
    assert page.eval("window.__same") is True
    calls = [url.split("/api/")[1] for url in page.requests if "/api/" in url]
    assert [url for url in calls if url.startswith(("steps", "list"))] == []  # rows wait until they are wanted
    page.wait("[...document.querySelectorAll('main button')].some(b => /2 more|new/i.test(b.innerText))")
    page.eval("[...document.querySelectorAll('main button')].find(b => /2 more|new/i.test(b.innerText)).click()")
    page.wait(f"document.querySelectorAll('tr[aria-rowindex]').length === {GROUPS + 1}")
