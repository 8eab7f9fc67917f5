"""The overview in a real browser: its numbers are those of the records, and it leads to every other page."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import rollbook
from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome, Page
from tests.browser.conftest import GROUPS, RUNS, STEPS, measured
from tests.viewer import story


def fixed(value: float, digits: int) -> str:
    """A number as the pages write it."""
    text = f"{value:.{digits}f}"
    return (text.lstrip("-") if float(text) == 0 else text).replace("-", "−")


@pytest.fixture(scope="module")
def records() -> dict[int, list[Any]]:
    return {step: story.rollout(step, GROUPS, RUNS) for step in range(STEPS)}


def cells(page: Page, row: int) -> list[str]:
    """The texts of a row of the table that is in sight."""
    texts: list[str] = page.eval(
        f"[...document.querySelector('tr[aria-rowindex=\"{row + 2}\"]').cells].map(c => c.innerText.trim())"
    )
    return texts


def heads(page: Page) -> list[str]:
    return [head.strip("↓↑") for head in page.texts("table[aria-label=Steps] th")]


def test_the_table_of_steps_says_what_the_records_say(page: Page, records: dict[int, list[Any]]) -> None:
    names = heads(page)
    for place in (0, 5, STEPS - 1):
        step = STEPS - 1 - place
        page.eval(f"document.querySelector('tr[aria-rowindex=\"{min(place + 2, 6)}\"]')?.scrollIntoView()")
        page.wait(f"!!document.querySelector('tr[aria-rowindex=\"{place + 2}\"]')")
        row = dict(zip(names, cells(page, place), strict=True))
        rewards = np.array([record.reward for record in records[step]], float)
        lengths = [len(record.tokens) - record.prompt_length for record in records[step]]
        assert row["Step"] == str(step)
        assert row["Samples"] == str(GROUPS * RUNS)
        assert row["Groups"] == str(GROUPS)
        assert row["Reward"] == fixed(float(np.nanmean(rewards)), 3)
        low, middle, high = np.nanquantile(rewards, [0.25, 0.5, 0.75])
        assert row["25 / 50 / 75%"].split() == [fixed(low, 2), fixed(middle, 2), fixed(high, 2)]
        truncated = np.mean([record.finish_reason == "length" for record in records[step]])
        assert float(row["Truncated"].strip("%")) == pytest.approx(100 * truncated, abs=0.51)
        assert float(row["Length"]) == pytest.approx(np.mean(lengths), rel=0.01)


def test_a_chart_turns_into_a_table_and_the_address_remembers(page: Page, records: dict[int, list[Any]]) -> None:
    page.click("button[aria-label='Reward: table']")
    assert "tables=reward" in page.hash()
    rows = page.eval(
        "[...document.querySelectorAll('.chart-table:not([hidden]) tbody tr')]"
        ".map(r => [...r.cells].map(c => c.innerText))"
    )
    assert [int(row[0]) for row in rows] == list(range(STEPS))[::-1]
    for row in rows:
        rewards = np.array([record.reward for record in records[int(row[0])]], float)
        assert float(row[6].replace("−", "-")) == pytest.approx(np.nanmean(rewards), abs=0.006)
        assert float(row[3].replace("−", "-")) == pytest.approx(np.nanmedian(rewards), abs=0.006)
    page.reload()
    page.wait("document.querySelectorAll('.chart-table:not([hidden]) tbody tr').length > 0")
    page.click("button[aria-label='Reward: table']")
    assert "tables" not in page.hash()


def test_parts_of_the_reward_have_curves_of_their_own(page: Page, records: dict[int, list[Any]]) -> None:
    page.eval(
        "(() => { const s = document.querySelector('select'); s.value = '*'; s.dispatchEvent(new Event('change')); })()"
    )
    assert "part=" in page.hash()
    legend = page.wait("document.querySelector('.chart-note:not([hidden])').innerText")
    last = records[STEPS - 1]
    accuracy = np.mean([record.metrics["accuracy"] for record in last])
    assert {"accuracy", "format", "length"} <= set(legend.split())
    assert float(legend.split("accuracy")[1].split()[0]) == pytest.approx(accuracy, abs=0.006)


def test_a_click_opens_a_step_and_a_drag_compares_two(page: Page) -> None:
    box = page.box(".chart-hit")
    page.click_at(box["x"] + 42, box["y"] + 60)
    page.wait("location.hash.startsWith('#/step/0')")
    page.eval("history.back()")
    page.wait("location.hash === '#/' && document.querySelectorAll('.chart-hit').length > 3")
    box = page.box(".chart-hit")
    page.drag((box["x"] + 44, box["y"] + 60), (box["x"] + box["width"] - 12, box["y"] + 60))
    assert page.hash() == f"#/compare?a=0-0&b={STEPS - 1}-{STEPS - 1}"


def test_a_chart_answers_keys_in_words(page: Page, records: dict[int, list[Any]]) -> None:
    page.eval("document.querySelector('.chart-hit').focus()")
    page.key("Home", "ArrowRight")
    spoken = page.eval("document.activeElement.getAttribute('aria-valuetext')")
    mean = np.mean([record.reward for record in records[1]])
    assert spoken.startswith(f"step 1: mean {fixed(float(mean), 3)}")
    page.key("Enter")
    page.wait("location.hash.startsWith('#/step/1')")


def test_health_is_explained_on_focus(page: Page) -> None:
    names = page.texts(".health-item .name")
    assert "Truncated" in names
    page.eval("document.querySelector('.health-item').focus()")
    assert "same reward" in page.text(".tip")
    page.eval("document.activeElement.blur()")
    assert page.count(".tip") == 0


def test_look_here_leads_to_its_samples(page: Page, server: Server) -> None:
    items = server.api.answers.findings()["items"]  # type: ignore[union-attr]
    assert items
    assert page.texts(".finding-title")[0].startswith(items[0]["title"])
    page.click(".finding-item a")
    page.wait("/^#.(samples|t|step)/.test(location.hash)")
    if items[0]["filter"]:
        total = server.api.answers.list(filter=items[0]["filter"])["total"]  # type: ignore[union-attr]
        page.wait(f"document.querySelector('.table-foot').innerText.startsWith('{total:,} sample')")


def test_evaluation_is_apart(page: Page) -> None:
    page.click(".segmented button:nth-child(2)")
    page.wait("location.hash === '#/?evaluation=1'")
    page.wait("document.querySelectorAll('tr[aria-rowindex]').length === 2")
    assert [cells(page, row)[0] for row in (0, 1)] == ["8", "0"]


def test_sorting_is_in_the_address(page: Page) -> None:
    page.click("table[aria-label=Steps] th:nth-child(4) button")
    assert page.hash() == "#/?sort=-reward"
    shown = [float(cells(page, row)[3].replace("−", "-")) for row in range(4)]
    assert shown == sorted(shown, reverse=True)
    page.reload()
    page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 3")
    assert [float(cells(page, row)[3].replace("−", "-")) for row in range(4)] == shown


def test_news_come_without_moving_the_reader(chrome: Chrome, growing: Server) -> None:
    page = chrome.page(height=500)
    page.goto(growing.url)
    page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 0")
    page.key("j", "j")
    page.wait("document.activeElement.tagName === 'TR'")
    measured(growing, 3 * GROUPS * RUNS)
    page.wait("document.querySelector('.facts').innerText.includes('step 2')")
    # What stands above the table has its height.
    page.wait(
        "(() => { const top = document.activeElement.getBoundingClientRect().top; const now = Date.now(); "
        "if (top !== window.seenTop) { window.seenTop = top; window.seenAt = now; } "
        "return now - window.seenAt > 700; })()"
    )
    before = page.eval(
        "[document.activeElement.cells[0].innerText, document.activeElement.getBoundingClientRect().top]"
    )
    assert before[0] == "1"
    requests_before = len([url for url in page.requests if "/api/steps" in url])
    with rollbook.open(str(growing._path)) as book:
        story.more(book, 3, GROUPS, RUNS)
    page.wait("document.querySelector('tr[aria-rowindex=\"2\"]').cells[0].innerText === '3'")
    measured(growing, 4 * GROUPS * RUNS)
    after = page.eval("[document.activeElement.cells[0].innerText, document.activeElement.getBoundingClientRect().top]")
    assert after == before
    later = [url for url in page.requests if "/api/steps" in url][requests_before:]
    assert later
    assert all("since=" in url for url in later)
    assert page.wait("document.querySelector('.facts').innerText.includes('step 3') && document.title")
    assert page.problems == []
    page.close()


def test_a_run_that_records_little_says_what_to_record(chrome: Chrome, tmp_path: Any) -> None:
    with rollbook.open(tmp_path / "bare") as book:
        book.append(
            [
                rollbook.Experience(
                    eid={"batch": 0, "task": 1, "run": 0, "suffix": "s"}, tokens=[1, 2, 3], prompt_length=1
                )
            ]
        )
    with Server(tmp_path / "bare", port=0) as server:
        measured(server)
        page = chrome.page()
        page.goto(server.url)
        page.wait("document.querySelectorAll('tr[aria-rowindex]').length === 1")
        notice = page.text("section[aria-label='Not recorded']")
        assert "ref_logprobs" in notice
        assert "old_logprobs" in notice
        assert "1 sample" in page.text("h1 + span")
        page.key("j", "Enter")
        page.wait("location.hash === '#/step/0'")
        page.wait("document.querySelectorAll('.cells').length === 1")
        assert "Not recorded in this step: reward" in page.text("main")
        assert page.problems == []
        page.close()


def test_names_from_data_are_text(chrome: Chrome, tmp_path: Any) -> None:
    hostile = '"><img src=x onerror="window.__pwn=1">\u202e'
    with rollbook.open(tmp_path / "hostile") as book:
        book.append(
            [
                rollbook.Experience(
                    eid={"batch": 0, "task": hostile, "run": run, "suffix": "s"},
                    tokens=[1, 2, 3],
                    prompt_length=1,
                    reward=float(run),
                    metrics={hostile: float(run)},
                    prompt_text=hostile,
                    response_text=hostile,
                )
                for run in range(2)
            ]
        )
    with Server(tmp_path / "hostile", port=0) as server:
        measured(server)
        page = chrome.page()
        page.goto(server.url)
        page.wait("document.querySelectorAll('tr[aria-rowindex]').length === 1")
        assert "⟦U+202E⟧" in page.text("select")
        page.goto(server.address + "/#/step/0?view=samples")
        page.wait("document.querySelectorAll('.name-cell').length === 2")
        assert "onerror" in page.text(".name-cell")
        page.key("j", " ")
        page.wait("!!document.querySelector('.peek')")
        assert json.dumps(page.eval("window.__pwn ?? null")) == "null"
        assert page.count("main img") == 0
        assert page.problems == []
        page.close()
