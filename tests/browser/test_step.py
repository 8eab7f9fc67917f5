"""The step page and the list over all steps in a real browser: filters, order, peek, selection, deep links, news."""

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

STEP = 6


@pytest.fixture(scope="module")
def records() -> list[Any]:
    return story.rollout(STEP, GROUPS, RUNS)


def opened(page: Page, server: Server, address: str) -> Page:
    """The page at an address of the app, once its rows are there."""
    page.goto(server.address + "/" + address)
    page.wait(f"location.hash === {json.dumps(address)} && document.querySelectorAll('tr[aria-rowindex]').length > 0")
    return page


def column(page: Page, place: int) -> list[str]:
    texts: list[str] = page.eval(
        f"[...document.querySelectorAll('tr[aria-rowindex]')].map(r => r.cells[{place}].innerText.trim())"
    )
    return texts


def decimal(text: str) -> float:
    return float(text.replace("−", "-"))


def test_groups_show_their_rewards(page: Page, server: Server, records: list[Any]) -> None:
    opened(page, server, f"#/step/{STEP}")
    assert page.text("h1") == f"Step {STEP}"
    assert f"{GROUPS} groups · {GROUPS * RUNS} samples" in page.text(".step-title")
    rewards: dict[str, list[float]] = {}
    for record in records:
        rewards.setdefault(str(record.eid.task), []).append(record.reward)
    names, labels, means = (
        column(page, 1),
        page.eval("[...document.querySelectorAll('.cells')].map(c => c.ariaLabel)"),
        column(page, 5),
    )
    assert sorted(names) == sorted(rewards)
    for name, label, mean in zip(names, labels, means, strict=True):
        best_first = sorted(rewards[name], reverse=True)
        assert [decimal(number) for number in label.split(": ")[1].split()] == pytest.approx(best_first, abs=0.0051)
        assert decimal(mean.split(" ± ")[0]) == pytest.approx(np.mean(best_first), abs=0.0051)
        assert decimal(mean.split(" ± ")[1]) == pytest.approx(np.std(best_first), abs=0.0051)
    assert page.count(".cell") == GROUPS * RUNS
    assert page.text(".table-foot").startswith(f"{GROUPS} groups · query ")


def test_histograms_count_every_sample_and_list_those_of_a_bar(page: Page, server: Server, records: list[Any]) -> None:
    opened(page, server, f"#/step/{STEP}?tables=length,reward")
    counted = page.eval(
        "[...document.querySelectorAll('.chart-table:not([hidden])')].map(t => "
        "[...t.querySelectorAll('tbody tr')].reduce((s, r) => s + Number(r.cells[2].innerText), 0))"
    )
    assert counted == [GROUPS * RUNS, GROUPS * RUNS]
    page.click("button[aria-label='Reward: table']")
    page.eval("document.querySelector('.quad .chart-hit').focus()")
    page.key("Home", "End", "Enter")
    page.wait("location.hash.includes('filter=reward')")
    page.wait("document.querySelector('.table-foot').innerText.includes('sample')")
    listed = page.wait("document.querySelectorAll('.name-cell').length")
    shown = [decimal(text) for text in column(page, 2)]
    assert min(shown) >= sorted((record.reward for record in records), reverse=True)[listed - 1] - 0.001
    assert max(shown) == pytest.approx(max(record.reward for record in records), abs=0.0006)


def test_a_point_opens_its_sample(page: Page, server: Server) -> None:
    opened(page, server, f"#/step/{STEP}")
    page.eval("document.querySelectorAll('.quad .chart-hit')[1].focus()")
    page.key("ArrowRight")
    assert "tokens, reward" in page.eval("document.activeElement.getAttribute('aria-valuetext')")
    page.key("Enter")
    page.wait("location.hash.startsWith('#/t/')")


def test_a_filter_finds_what_it_says(page: Page, server: Server, records: list[Any]) -> None:
    opened(page, server, f"#/step/{STEP}?view=samples")
    page.key(":")
    page.type("rew")
    assert "reward" in page.wait("[...document.querySelectorAll('.suggestion')].map(s => s.innerText).join()")
    page.key("ArrowDown", "Enter")
    page.type(" > 0.5")
    page.key("Enter")
    count = sum(record.reward > 0.5 for record in records)
    page.wait(f"document.querySelector('.table-foot').innerText.startsWith('{count} sample')")
    assert page.hash() == f"#/step/{STEP}?view=samples&filter=reward%20%3E%200.5"
    assert all(decimal(text) > 0.5 for text in column(page, 2))
    page.click(".filter-line button")
    page.wait(f"document.querySelector('.table-foot').innerText.startsWith('{GROUPS * RUNS} samples')")


def test_a_filter_that_is_wrong_takes_nothing_away(chrome: Chrome, server: Server) -> None:
    page = chrome.page()
    page.goto(server.url)
    page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 0")
    opened(page, server, f"#/step/{STEP}?view=samples")
    page.click(".filter-line input")
    page.type("rewrad > 1")
    page.key("Enter")
    assert "reward" in page.wait("document.querySelector('.filter-error').innerText")
    assert page.count(".name-cell") == GROUPS * RUNS
    page.close()


def test_a_deep_link_restores_everything(page: Page, server: Server, records: list[Any]) -> None:
    by_reward = sorted(records, key=lambda record: record.reward)
    at = by_reward[2].eid.uid
    address = (
        f"#/step/{STEP}?view=samples&filter=reward%20%3C%202&sort=reward&at={at.replace('/', '%2F')}&peek=1"
        f"&x={by_reward[0].eid.uid.replace('/', '%2F')}&tables=entropy"
    )
    state = (
        "[location.hash, document.querySelector('main').innerText.replace(/query [\\d.]+ ms/, ''), "
        "document.activeElement.getAttribute('aria-rowindex'), "
        "document.querySelectorAll('[aria-selected=true]').length]"
    )
    page.goto(server.address + "/" + address)
    page.wait("(document.querySelector('.peek-text:last-child')?.innerText ?? '…')[0] !== '…'")
    page.wait("document.querySelectorAll('.chart-table:not([hidden]) tr').length > 2")
    first = page.eval(state)
    assert first[0] == address
    assert first[2] == "4"
    assert first[3] == 1
    assert [decimal(text) for text in column(page, 2)] == pytest.approx(
        [record.reward for record in by_reward], abs=0.0006
    )
    page.reload()
    page.wait("(document.querySelector('.peek-text:last-child')?.innerText ?? '…')[0] !== '…'")
    page.wait("document.querySelectorAll('.chart-table:not([hidden]) tr').length > 2")
    page.wait(f"JSON.stringify({state}) === {json.dumps(json.dumps(first, ensure_ascii=False, separators=(',', ':')))}")


def test_peek_shows_how_a_sample_ends(page: Page, server: Server) -> None:
    opened(page, server, f"#/step/{STEP}?view=samples&sort=-reward")
    page.key("j", " ")
    page.wait("!!document.querySelector('.peek')")
    uid = page.eval("new URLSearchParams(location.hash.split('?')[1]).get('at')")
    text = server.api.source.trajectories([uid])[0].text  # type: ignore[union-attr]
    end = text.rstrip().splitlines()[-1].removesuffix("<|im_end|>")[-20:]
    page.wait(f"document.querySelector('.peek').innerText.includes({json.dumps(end)})")
    page.key("j")
    assert page.eval("new URLSearchParams(location.hash.split('?')[1]).get('at')") != uid
    page.key("Escape")
    assert page.count(".peek") == 0
    assert "peek" not in page.hash()


def test_two_samples_of_a_group_are_compared(page: Page, server: Server, records: list[Any]) -> None:
    task = records[0].eid.task
    opened(page, server, f"#/step/{STEP}?view=samples&filter=task%20%3D%20{task}")
    page.key("j", "x", "j", "x")
    assert page.text(".selection").startswith("2 samples selected")
    assert page.count("[aria-selected=true]") == 2
    page.key("d")
    page.wait("location.hash.startsWith('#/group/') && location.hash.includes('diff=')")


def test_stars_stay(page: Page, server: Server) -> None:
    opened(page, server, f"#/step/{STEP}")
    page.key("j", "j", "*")
    assert page.count(".starred") == 1
    name = page.eval("document.querySelector('tr:has(.starred)').cells[1].innerText")
    page.reload()
    page.wait("document.querySelectorAll('.starred').length === 1")
    assert page.eval("document.querySelector('tr:has(.starred)').cells[1].innerText") == name
    page.key("*")
    assert page.count(".starred") == 0


def test_the_filter_goes_along_from_step_to_step(page: Page, server: Server) -> None:
    opened(page, server, f"#/step/{STEP}?view=samples&filter=reward%20%3E%200")
    page.key("J")
    page.wait(f"location.hash === '#/step/{STEP + 1}?view=samples&filter=reward%20%3E%200'")
    page.wait(f"document.querySelector('h1')?.innerText === 'Step {STEP + 1}'")
    page.key("K")
    page.wait(f"document.querySelector('h1')?.innerText === 'Step {STEP}'")
    page.key("g")
    page.type("0")
    page.key("Enter")
    page.wait("document.querySelector('h1')?.innerText === 'Step 0'")
    assert page.eval("document.querySelector('a[aria-label=\"Previous step\"]').hasAttribute('href')") is False
    assert page.count(".versus:not([hidden])") == 0


def test_the_list_over_all_steps_is_long_and_complete(page: Page, server: Server) -> None:
    opened(page, server, "#/samples?sort=step")
    total = server.api.answers.list()["total"]  # type: ignore[union-attr]
    assert page.text(".table-foot").startswith(f"{total} samples")
    page.eval("window.scrollTo(0, 1e6)")
    page.wait(f"!!document.querySelector('tr[aria-rowindex=\"{total + 1}\"] a')")
    assert page.eval(f"document.querySelector('tr[aria-rowindex=\"{total + 1}\"]').cells[1].innerText") == str(
        STEPS - 1
    )
    assert page.count("tr[aria-rowindex]") < 80
    page.key("v")
    page.wait("document.querySelectorAll('.cells').length > 5")
    assert "view=groups" in page.hash()


def test_a_step_that_grows_waits_for_the_reader(chrome: Chrome, growing: Server) -> None:
    page = chrome.page()
    page.goto(growing.url)
    page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 0")
    opened(page, growing, "#/step/2?view=samples")
    page.key("j", "j", "j")
    at = page.eval("[document.activeElement.innerText, document.activeElement.getBoundingClientRect().top]")
    more = [record.replace(eid=record.eid.replace(run=record.eid.run + 100)) for record in story.rollout(2, 1, RUNS)]
    with rollbook.open(str(growing._path)) as book:
        book.append(more)
    page.wait(f"document.querySelector('.step-title').innerText.includes('{GROUPS * RUNS + RUNS} samples')")
    page.wait(f"document.querySelector('.panel-head').innerText.includes('Show {RUNS} new samples')")
    assert page.count(".name-cell") == GROUPS * RUNS
    assert page.eval("[document.activeElement.innerText, document.activeElement.getBoundingClientRect().top]") == at
    measured(growing, 3 * GROUPS * RUNS + RUNS)
    page.eval("[...document.querySelectorAll('.panel-head button')].find(b => b.innerText.startsWith('Show')).click()")
    page.wait(f"document.querySelectorAll('.name-cell').length === {GROUPS * RUNS + RUNS}")
    assert page.problems == []
    page.close()


def test_a_step_that_is_not_there_says_so(page: Page, server: Server) -> None:
    page.goto(server.address + "/#/step/999")
    assert page.wait("document.querySelector('main .empty-state, main .failure')?.innerText")
    page.goto(server.address + "/#/step/x")
    assert "is not a step number" in page.wait("document.querySelector('.failure')?.innerText ?? ''")
