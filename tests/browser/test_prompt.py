"""The page of one prompt in a real browser: its rewards over training, and two steps word against word."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from rollbook.inspect.server import Server
from tests.browser.chrome import Page
from tests.browser.conftest import GROUPS, RUNS, STEPS
from tests.viewer import story

TASK = 1
"""Seen at steps 0, 5 and 10: a task with a tool."""
SEEN = [step for step in range(STEPS) if any((step * GROUPS + place) % (GROUPS * 5) == TASK for place in range(GROUPS))]


@pytest.fixture(scope="module")
def rows() -> dict[int, list[Any]]:
    """The samples of the task, by step, best first."""
    by_step = {
        step: [row for row in story.rollout(step, GROUPS, RUNS) if str(row.eid.task) == str(TASK)] for step in SEEN
    }
    return {step: sorted(of_step, key=lambda row: -row.reward) for step, of_step in by_step.items()}


def address(server: Server, rows: dict[int, list[Any]]) -> str:
    uid = rows[SEEN[0]][0].eid.uid
    return "#/prompt/" + server.api.source.trajectories([uid])[0].prompt  # type: ignore[union-attr]


def show(page: Page, address: str) -> None:
    page.eval(f"location.hash = {json.dumps(address)}")
    page.wait("!!document.querySelector('.diff-view') && document.title.startsWith('Prompt')")


def chosen(page: Page) -> list[str]:
    labels: list[str] = page.eval(
        "[...document.querySelectorAll('.prompt-pair select')].map(s => s.selectedOptions[0].text)"
    )
    return labels


def test_the_page_says_what_the_records_say(page: Page, server: Server, rows: dict[int, list[Any]]) -> None:
    assert len(SEEN) == 3
    show(page, address(server, rows))
    assert story.question(TASK)[0] in page.text(".prompt-words")
    table = page.eval(
        "[...document.querySelectorAll('section[aria-label=Steps] tbody tr')].map(r => [...r.cells].map(c => "
        "c.innerText.replace('−', '-')))"
    )
    assert [int(row[0]) for row in table] == SEEN[::-1]
    for row in table:
        rewards = [record.reward for record in rows[int(row[0])]]
        assert int(row[1]) == RUNS
        assert float(row[2]) == pytest.approx(np.mean(rewards), abs=6e-4)
        assert float(row[3]) == pytest.approx(np.median(rewards), abs=6e-4)
        assert (float(row[4]), float(row[5])) == pytest.approx((max(rewards), min(rewards)), abs=6e-4)


def test_every_sample_is_a_dot_where_its_reward_is(page: Page, server: Server, rows: dict[int, list[Any]]) -> None:
    show(page, address(server, rows))
    page.wait(f"document.querySelectorAll('.plot-dot').length === {len(SEEN) * RUNS}")
    dots = page.eval(
        "[...document.querySelectorAll('.plot-dot')].map(d => [Number(d.dataset.step), Number(d.dataset.place), "
        "Number(d.getAttribute('cy'))])"
    )
    heights = [y for _, _, y in dots]
    rewards = [rows[step][place].reward for step, place, _ in dots]
    slope, base = np.polyfit(rewards, heights, 1)
    assert slope < 0 and np.allclose(np.array(rewards) * slope + base, heights, atol=0.6)
    assert page.count(".plot-band") == page.count(".plot-mean") == 1
    step, place, _ = dots[-1]
    box = page.eval(
        "(() => { const r = [...document.querySelectorAll('.plot-dot')].at(-1).getBoundingClientRect(); "
        "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    page.click_at(*box)
    page.wait("!!document.querySelector('.tk-pane')")
    assert page.hash() == "#/t/" + quote(rows[step][place].eid.uid, safe="")


def test_two_steps_stand_side_by_side_and_the_address_remembers(
    page: Page, server: Server, rows: dict[int, list[Any]]
) -> None:
    show(page, address(server, rows))
    assert [label.split(" ·")[0] for label in chosen(page)[::2]] == [f"step {SEEN[0]}", f"step {SEEN[-1]}"]
    page.key("[")
    page.wait(f"document.querySelectorAll('.diff-name')[1].innerText.startsWith('step {SEEN[1]},')")
    assert f"b={SEEN[1]}" in page.hash()
    page.eval(
        "(() => { const s = document.querySelector('[aria-label=\"Sample of side B\"]'); s.value = '2'; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    other = rows[SEEN[1]][2].eid.uid
    page.wait(f"location.hash.includes({json.dumps('ub=' + quote(other, safe=''))})")
    page.wait(
        "document.querySelectorAll('.prompt-pair a')[1]"
        f".getAttribute('href') === {json.dumps('#/t/' + quote(other, safe=''))}"
    )
    address_before = page.hash()
    page.reload()
    page.wait("!!document.querySelector('.diff-view')")
    assert page.hash() == address_before
    assert [label.split(" ·")[0] for label in chosen(page)] == [f"step {SEEN[0]}", "#1", f"step {SEEN[1]}", "#3"]
    source = server.api.source  # type: ignore[union-attr]
    left, right = source.trajectories([rows[SEEN[0]][0].eid.uid, other])
    sides = page.eval(
        "[0, 1].map(i => [...document.querySelectorAll('.diff-row')].map(r => r.children[i].textContent).join(''))"
    )
    assert sides == [left.text[left.prompt_end :], right.text[right.prompt_end :]]
    common = page.eval(
        "[0, 1].map(i => [...document.querySelectorAll('.diff-row')].flatMap(r => [...r.children[i].childNodes])"
        ".filter(n => n.nodeType === Node.TEXT_NODE).map(n => n.textContent).join('').replace(/\\s+/g, ''))"
    )
    assert common[0] == common[1] != ""  # what is not marked is the same on both sides
    assert page.count(".diff-view del") > 0 and page.count(".diff-view ins") > 0


def test_keys_and_the_mouse_choose_the_steps(page: Page, server: Server, rows: dict[int, list[Any]]) -> None:
    show(page, address(server, rows))
    page.key("}")
    page.wait(f"location.hash.includes('a={SEEN[1]}')")
    page.key("s")
    page.wait(f"document.querySelectorAll('.diff-name')[0].innerText.startsWith('step {SEEN[-1]},')")
    page.eval("document.querySelector('.plot').focus()")
    page.key("Home")
    assert f"step {SEEN[0]}: mean" in page.text(".chart-now")
    page.key("Enter")
    page.wait(f"document.querySelectorAll('.diff-name')[1].innerText.startsWith('step {SEEN[0]},')")
    box = page.box(".plot")
    page.click_at(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)  # the middle of three steps, no dot
    page.wait(f"location.hash.includes('b={SEEN[1]}') || !!document.querySelector('.tk-pane')")
    assert f"b={SEEN[1]}" in page.hash()
    page.click("button[aria-label='Reward over training: table']")
    assert [int(row.split()[0]) for row in page.texts(".chart-table tbody tr")] == SEEN


def test_a_prompt_that_is_not_here_says_so(page: Page) -> None:
    page.eval("location.hash = '#/prompt/0123456789abcdef'")
    page.wait("document.querySelector('.failure h1')?.innerText === 'Not found'")
    assert "0123456789abcdef" in page.text(".failure")
    page.wait_until_idle()
    assert all("/api/prompt" in problem for problem in page.problems)
    page.problems.clear()
