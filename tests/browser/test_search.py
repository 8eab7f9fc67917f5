"""The search page in a real browser: what it finds is what the texts say, by keys and by addresses."""

from __future__ import annotations

import functools
import re
from typing import Any
from urllib.parse import quote

import pytest

from rollbook.inspect.server import Server
from tests.browser.chrome import Page
from tests.browser.conftest import GROUPS, RUNS, STEPS, measured
from tests.viewer import story


@pytest.fixture(scope="module")
def texts(server: Server) -> dict[str, str]:
    """The response of each sample of training, by uid; the server's index of texts is complete."""
    uids = [row.eid.uid for step in range(STEPS) for row in story.rollout(step, GROUPS, RUNS)]
    source = server.api.source  # type: ignore[union-attr]
    responses_by_uid = {
        sample.uid: sample.text[sample.prompt_end :]
        for at in range(0, len(uids), 64)
        for sample in source.trajectories(uids[at : at + 64])
    }
    while not server.api.answers.search("answer")["complete"]:  # type: ignore[union-attr]
        pass
    return responses_by_uid


def search(page: Page, **options: Any) -> None:
    """Open the address of a search and wait for its answer."""
    page.eval(
        f"location.hash = '#/search?{'&'.join(f'{name}={quote(str(value))}' for name, value in options.items())}'"
    )
    page.wait(
        "document.querySelector('.search-page') && (document.querySelector('p[role=status]')"
        ".innerText.includes('ms') || !!document.querySelector('[role=alert]'))"
    )


def listed(page: Page) -> set[str]:
    return set(page.texts(".hit-id"))


def responses(page: Page) -> set[str]:
    hits = page.eval(
        "[...document.querySelectorAll('.hit-link')].map(e => [e.querySelector('.hit-id').innerText, "
        "e.querySelector('.chip').innerText])"
    )
    return {uid for uid, part in hits if part == "response"}


def test_words_are_found_where_they_stand_and_nowhere_else(page: Page, texts: dict[str, str]) -> None:
    search(page, q="let me reconsider", limit=1000)
    expected = {uid for uid, text in texts.items() if re.search(r"let me reconsider\b", text, re.IGNORECASE)}
    assert responses(page) & texts.keys() == expected and 0 < len(expected) < len(texts)
    assert {word.lower() for word in page.texts("mark")} == {"let me reconsider"}
    assert f"{page.count('.hit')} matches" in page.text("p[role=status]")
    steps = [int(hit.split("/")[0]) for hit in page.texts(".hit-id")]
    assert steps == sorted(steps, reverse=True)


def test_parts_of_words_and_patterns_have_modes_of_their_own(page: Page, texts: dict[str, str]) -> None:
    search(page, q="econsid", limit=1000)
    assert page.count(".hit") == 0 and "Anywhere" in page.text(".empty-state")
    page.click(".segmented button:nth-child(2)")
    page.wait("document.querySelectorAll('.hit').length > 0")
    assert "mode=substring" in page.hash()
    assert responses(page) & texts.keys() == {uid for uid, text in texts.items() if "econsid" in text}
    search(page, q=r"leaves -?\d+\.</think>", mode="regex", step=3, limit=1000)
    expected = {
        uid for uid, text in texts.items() if uid.startswith("3/") and re.search(r"leaves -?\d+\.</think>", text)
    }
    assert responses(page) & texts.keys() == expected and expected
    assert page.eval("document.querySelector('[aria-label=\"Only in step\"]').value") == "3"


def test_keys_go_from_result_to_result_and_into_one(page: Page, texts: dict[str, str]) -> None:
    page.key("/")
    page.type("let me verify")
    page.key("Enter")
    page.wait("location.hash === '#/search?q=let%20me%20verify' && document.querySelectorAll('.hit').length > 3")
    at = "[...document.querySelectorAll('.hit-link')].indexOf(document.activeElement)"
    assert page.wait(f"{at} === 0 || null") is True
    page.key("j", "j")
    assert page.eval(at) == 2
    page.key("k")
    assert page.eval(at) == 1
    uid = page.texts(".hit-id")[1]
    page.key("/")
    assert page.eval("document.activeElement.getAttribute('aria-label')") == "Search for"
    page.key("ArrowDown", "j", "Enter")
    page.wait("!!document.querySelector('.tk-pane .tk-chunk')")
    assert page.hash().startswith("#/t/" + quote(uid, safe="")) and "q=" in page.hash()
    page.wait(
        "CSS.highlights.size > 0 && [...CSS.highlights.values()].some(h => h.size > 0)"
    )  # the place is marked there
    page.eval("history.back()")
    page.wait("document.querySelectorAll('.hit').length > 3")
    assert page.hash() == "#/search?q=let%20me%20verify"


def test_more_results_are_asked_for(page: Page, texts: dict[str, str]) -> None:
    search(page, q="boxes")
    assert page.count(".hit") == 100
    page.eval("[...document.querySelectorAll('main button')].find(b => b.innerText === 'Show more').click()")
    page.wait("document.querySelectorAll('.hit').length > 100")
    assert "limit=200" in page.hash()
    shown = page.count(".hit")
    page.reload()
    page.wait(f"document.querySelectorAll('.hit').length === {shown}")


def test_a_pattern_that_would_run_for_ever_is_stopped_with_words(
    page: Page, server: Server, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    searching = server.api.answers.searching  # type: ignore[union-attr]
    monkeypatch.setattr(searching, "search", functools.partial(searching.search, seconds=1.0))
    search(page, q=r"(\w+\s?)+@@", mode="regex")
    alert = page.text("[role=alert]")
    assert "timed out" in alert and "1 seconds" in alert and r"(\\w+" in alert
    assert page.count(".hit") == 0
    search(page, q="[a-", mode="regex")
    assert "expected a regular expression" in page.text("[role=alert]")
    page.wait_until_idle()
    assert page.problems and all("/api/search" in problem for problem in page.problems)  # the two answers 504 and 400
    page.problems.clear()


def test_a_search_during_the_reading_of_texts_says_so_and_goes_on(
    page: Page, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    searching = server.api.answers.searching  # type: ignore[union-attr]
    done: list[bool] = []
    monkeypatch.setattr(searching, "complete", lambda: bool(done))
    monkeypatch.setattr("rollbook.inspect.search._FIRST_WAIT_SECONDS", 0.0)
    search(page, q="let me verify")
    status = page.text("p[role=status]")
    total = measured(server).api.answers.run()["progress"]["total"]  # type: ignore[union-attr]
    assert "indexing texts" in status and f"of {total} searched" in status
    page.key("j")
    focused = page.eval("document.activeElement.innerText")
    done.append(True)
    page.wait("!document.querySelector('p[role=status]').innerText.includes('indexing texts')")
    assert page.eval("document.activeElement.innerText") == focused  # who stands on a result stays on it


def test_what_is_searched_for_is_text(page: Page, texts: dict[str, str]) -> None:
    search(page, q="<script>window.__pwn=1</script>", mode="substring")
    assert page.texts(".hit-id") == ["5/2/1/0/s"] and page.text("mark") == "<script>window.__pwn=1</script>"
    assert "⟦U+202E⟧" in page.text(".hit-text")
    search(page, q='"let me" AND NOT (verify* OR NEAR(')  # words like any others to the index
    assert page.count(".hit") == 0 and page.count("[role=alert]") == 0
    assert page.eval("window.__pwn") is None
