"""The page of a group in a real browser: columns, strips, scrolling together, differences, the fork tree."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from rollbook.inspect.server import Server
from rollbook.inspect.trajectory import Trajectory
from tests.browser.chrome import Page
from tests.browser.conftest import RUNS
from tests.browser.test_tokens import document
from tests.browser.test_trajectory import params

GID = "5/1"
TOOLS = "1/4"


def group(server: Server, gid: str) -> dict[str, Any]:
    return server.api.answers.group(gid=gid)  # type: ignore[union-attr]


def samples(server: Server, gid: str) -> list[Trajectory]:
    """The group's samples, best reward first."""
    return [document(server, row["uid"]) for row in group(server, gid)["rows"]]


def open_group(page: Page, gid: str, query: str = "", columns: int = RUNS) -> None:
    page.eval(f"location.hash = {json.dumps('#/group/' + gid.replace('/', '%2F') + query)}")
    page.wait(f"document.querySelectorAll('.gp-column .tk-chunk').length >= {columns}")
    page.eval("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def names(page: Page) -> list[str]:
    return page.texts(".gp-column-head a")


def test_samples_stand_side_by_side_in_the_order_asked_for(page: Page, server: Server) -> None:
    rows = group(server, GID)["rows"]
    open_group(page, GID)
    best = [f"#{row['run']}" for row in sorted(rows, key=lambda row: -row["reward"])]
    assert names(page) == best
    texts = page.eval(
        "[...document.querySelectorAll('.gp-column .tk-pane')].map(p => "
        "[...p.querySelectorAll('.tk-chunk')].map(c => c.textContent).join(''))"
    )
    for name, text in zip(best, texts, strict=True):
        sample = document(server, next(row["uid"] for row in rows if f"#{row['run']}" == name))
        first = sample.token(sample.prompt_tokens + 3)
        assert text.startswith("".join(sample.token(sample.prompt_tokens + i) for i in range(3)) + first)
    foot = page.texts(".gp-column-foot")[0]
    assert "accuracy" in foot and "length" in foot
    page.eval(
        "(() => { const s = document.querySelector('[aria-label=\"sort samples\"]'); s.value = "
        "'longest'; s.dispatchEvent(new Event('change')); })()"
    )
    page.wait("location.hash.includes('sort=longest')")
    lengths = {f"#{row['run']}": row["response_tokens"] for row in rows}
    assert [lengths[name] for name in names(page)] == sorted(lengths.values(), reverse=True)
    page.key("-", "-")
    assert names(page) == sorted(lengths, key=lambda name: -lengths[name])[:2] and params(page)["cols"] == "2"


def test_strips_show_and_hide_columns_and_lead_to_places(page: Page, server: Server) -> None:
    open_group(page, GID, "?cols=2", 2)
    assert (
        page.count(".gp-strip") == RUNS
        and page.eval("document.querySelectorAll('.gp-name[aria-pressed=true]').length") == 2
    )
    hidden = page.eval(
        "[...document.querySelectorAll('.gp-name[aria-pressed=false]')].map(b => b.children[1].textContent)"
    )
    page.click(".gp-name[aria-pressed=false]")
    assert names(page)[-1] == hidden[0] and len(names(page)) == 3
    shown = params(page)["show"]
    page.reload()
    page.wait("document.querySelectorAll('.gp-column').length === 3")
    assert names(page)[-1] == hidden[0] and params(page)["show"] == shown
    page.wait(
        "(() => { const c = document.querySelector('.gp-strip canvas'), d = "
        "c.getContext('2d').getImageData(0, c.height - 3, c.width, 1).data;"
        " const seen = new Set(); for (let i = 0; i < d.length; i += 4) seen.add(d.slice(i, i + 4).join()); "
        "return seen.size > 5; })()"
    )
    page.eval("document.querySelectorAll('.gp-column [aria-label^=hide]')[0].click()")
    assert len(names(page)) == 2


SCROLL = """(async () => {
  const panes = [...document.querySelectorAll('.gp-column .tk-pane')];
  panes[0].dispatchEvent(new WheelEvent('wheel', { bubbles: true }));
  panes[0].scrollTop = %s;
  for (let i = 0; i < 6; i++) await new Promise(done => requestAnimationFrame(done));
  return panes.map(p => [p.scrollTop, p.scrollHeight - p.clientHeight]);
})()"""


@pytest.fixture
def low(page: Page) -> Page:
    """A window so low that every column scrolls."""
    page.viewport(1100, 420)
    return page


def test_columns_scroll_together_by_token_percent_and_turn_or_not(low: Page, server: Server) -> None:
    page = low
    page.viewport(900, 300)
    open_group(page, TOOLS, "?sync=percent")
    panes = page.eval(SCROLL % "(panes[0].scrollHeight - panes[0].clientHeight) / 2")
    assert all(scroll_height > 20 for _, scroll_height in panes)
    assert all(abs(top / scroll_height - 0.5) < 0.04 for top, scroll_height in panes)
    page.key("s")  # turn
    assert params(page)["sync"] == "turn"
    panes = page.eval(SCROLL % "0")
    assert all(top == 0 for top, _ in panes)
    page.key("s")  # off
    before = page.eval("[...document.querySelectorAll('.gp-column .tk-pane')].map(p => p.scrollTop)")
    panes = page.eval(SCROLL % "40")
    assert panes[0][0] == 40 and [top for top, _ in panes[1:]] == before[1:]
    page.key("s")  # by token
    assert "sync" not in params(page)
    panes = page.eval(SCROLL % "60")
    assert panes[0][0] == 60 and all(top > 0 for top, _ in panes)
    places = page.eval(
        """[...document.querySelectorAll('.gp-column .tk-pane')].map((pane) => {
        const top = pane.getBoundingClientRect().top;
        let before = 0;
        for (const chunk of pane.querySelectorAll('.tk-chunk')) {
          const box = chunk.getBoundingClientRect();
          const share = Math.max(0, Math.min(1, (top - box.top) / box.height));
          before += share * chunk.textContent.length;
        }
        return before; })"""
    )
    # The characters above the edge are those of as many tokens, which are about as long in every column.
    free = [place for place, (top, scroll_height) in zip(places, panes, strict=True) if top < scroll_height - 1]
    assert max(free) < 1.5 * min(free) + 40


def test_the_lens_changes_colors_and_nothing_else(low: Page, server: Server) -> None:
    page = low
    page.viewport(900, 300)
    open_group(page, TOOLS, "?sync=off")
    page.eval("[...document.querySelectorAll('.gp-column .tk-pane')].forEach((p, i) => { p.scrollTop = 10 + 7 * i; })")
    before = page.eval("[...document.querySelectorAll('.gp-column .tk-pane')].map(p => p.scrollTop)")
    assert page.count(".gp-column [class*=tq-s]") > 10
    page.key("6")
    assert page.count(".gp-column [class*=tq-s]") == 0 and page.count(".gp-column [class*=tq-d]") > 10
    assert page.eval("[...document.querySelectorAll('.gp-column .tk-pane')].map(p => p.scrollTop)") == before


def test_first_differences_are_marked(page: Page, server: Server) -> None:
    drawn = samples(server, GID)
    open_group(page, GID)
    marks = page.eval(
        "[...document.querySelectorAll('.gp-column')].map(c => c.querySelector('.tk-fork')?.textContent ?? null)"
    )
    for sample, mark in zip(drawn[1:], marks[1:], strict=True):
        a, b = sample.ids[sample.prompt_tokens :], drawn[0].ids[drawn[0].prompt_tokens :]  # type: ignore[index]
        size = min(len(a), len(b))
        at = int(np.argmax(a[:size] != b[:size]))
        assert mark == sample.token(sample.prompt_tokens + at)


def test_differences_of_two_samples_are_those_of_their_words(page: Page, server: Server) -> None:
    drawn = samples(server, GID)
    open_group(page, GID)
    page.key("d")
    page.wait("!!document.querySelector('.diff-view')")
    keys = params(page)["diff"].split(",")
    assert [unquote(key) for key in keys] == [drawn[0].uid, drawn[-1].uid]  # the best and the worst
    assert (
        len(keys) == 2
        and page.count(".gp-column") == RUNS
        and page.eval("document.querySelector('.gp-columns').hidden")
    )
    page.eval("document.querySelectorAll('.diff-fold').forEach(b => b.click())")
    left, right = (sample.text[sample.ends[sample.prompt_tokens - 1] :] for sample in (drawn[0], drawn[-1]))
    sides = page.eval(
        "[0, 1].map(side => [...document.querySelectorAll('.diff-row')].map(r => "
        "r.children[side].textContent).join(''))"
    )
    assert sides == [left, right]
    same = [
        page.eval(
            f"[...document.querySelectorAll('.diff-row')].map(r => [...r.children[{side}].childNodes].filter(n => "
            f"n.nodeType === 3).map(n => n.textContent).join('')).join('')"
        )
        for side in (0, 1)
    ]
    assert same[0] == same[1]
    words = [re.findall(r"\w+|\s+|[^\w\s]", text) for text in (left, right)]
    least = sum(
        block.size for block in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_matching_blocks()
    )
    share = float(re.match(r"([\d.]+)%", page.text(".diff-sum"))[1]) / 100  # type: ignore[index]
    assert share * max(map(len, words)) > 0.9 * least
    page.eval(
        "[...document.querySelectorAll('.gp-diff .segmented button')].find(b => b.textContent === 'tokens').click()"
    )
    page.wait("location.hash.includes('by=token')")
    assert "of tokens equal" in page.text(".diff-sum")
    page.reload()
    page.wait("document.querySelector('.diff-sum')?.textContent.includes('of tokens equal')")
    page.key("Escape")
    page.wait("!document.querySelector('.diff-view')")
    assert "diff" not in params(page) and not page.eval("document.querySelector('.gp-columns').hidden")


def test_the_fork_tree_has_the_groups_forks_and_leads_to_samples(page: Page, server: Server) -> None:
    drawn = samples(server, GID)
    responses = [sample.ids[sample.prompt_tokens :].tolist() for sample in drawn]  # type: ignore[index]
    shared = next(i for i in range(999) if len({row[i] for row in responses}) > 1)
    ways = {token: [row for row in responses if row[shared] == token] for token in {row[shared] for row in responses}}
    open_group(page, GID)
    page.key("f")
    page.wait("!!document.querySelector('.fork-node')")
    root = page.eval(
        "(() => { const n = document.querySelector('.fork-node[aria-level=\"1\"]'); return "
        "[n.getAttribute('aria-label'), n.title]; })()"
    )
    mean = float(np.mean([sample.reward for sample in drawn]))
    entropy = float(np.mean([sample.arrays["entropy"][sample.prompt_tokens + shared] for sample in drawn]))
    assert f"{RUNS} samples" in root[0] and f"splits into {len(ways)} after {shared} response tokens" in root[0]
    numbers = [float(number.replace("−", "-")) for number in re.findall(r"(?:reward|split) (−?[\d.]+)", root[0])]
    assert numbers == pytest.approx([mean, entropy], abs=0.006)
    children = page.eval(
        "[...document.querySelectorAll('.fork-node[aria-level=\"2\"]')].map(n => "
        "n.querySelector('.fork-n').textContent)"
    )
    counts = sorted((1 if label.startswith("#") else int(label[1:])) for label in children)
    assert counts == sorted(len(rows) for rows in ways.values())
    page.eval("document.querySelector('.fork-node').focus()")
    page.key("ArrowRight")
    level = page.eval("document.activeElement.getAttribute('aria-level')")
    chosen = page.eval("document.activeElement.querySelector('.fork-n').textContent")
    assert level == "2"
    page.key("Enter")
    page.wait("location.hash.includes('show=')")
    assert len(names(page)) == (1 if chosen.startswith("#") else int(chosen[1:]))
    assert params(page)["map"] == "tree"


def test_cursor_columns_and_the_way_to_a_sample(page: Page, server: Server) -> None:
    drawn = samples(server, GID)
    open_group(page, GID)
    page.key("j", "l", "l")
    state = params(page)
    sample = drawn[1]
    assert state["on"] == sample.uid and int(state["at"]) == sample.prompt_tokens + 1
    line = page.text(".gp-token")
    assert f"#{sample.run} token 1" in line and "Entropy" in line
    page.reload()
    page.wait("document.querySelector('.gp-token')?.textContent.includes('token 1')")
    assert params(page) == state
    assert page.eval("document.querySelectorAll('.gp-column[data-active=true]').length") == 1
    page.key("Enter")
    page.wait("location.hash.startsWith('#/t/')")
    page.wait("!!document.querySelector('.ti-title')")
    assert page.text(".ti-title").startswith(f"Token #{sample.prompt_tokens + 1} ")


def test_the_prompt_its_picture_and_its_other_steps(page: Page, server: Server) -> None:
    shown = group(server, TOOLS)
    open_group(page, TOOLS)
    assert page.text(".gp-opening") == shown["opening"] and page.text(".gp-answer b") == shown["reference"]
    assert page.count(".gp-prompt summary img") == 1
    page.key("v")
    page.wait("!!document.querySelector('.gp-prompt .tk-pane .tk-figure img')")
    assert "careful assistant" in page.eval("document.querySelector('.gp-prompt .tk-pane').textContent")
    assert params(page)["prompt"] == "open"
    steps = page.texts(".gp-time")
    assert steps == [str(entry["step"]) for entry in shown["timeline"]]
    page.key("J")
    page.wait(f"location.hash.startsWith({json.dumps('#/group/' + shown['next'].replace('/', '%2F'))})")


def test_a_group_without_variance_says_so(page: Page, server: Server) -> None:
    listed = server.api.answers.list(view="groups", limit=200)["rows"]  # type: ignore[union-attr]
    flat = [row for row in listed if "zero-variance" in row["flags"]]
    truncated = next(row for row in listed if "truncated" in row["flags"])
    open_group(page, truncated["gid"])
    assert "truncated" in page.text(".tp-head")
    if flat:
        open_group(page, flat[0]["gid"])
        assert "zero variance" in page.text(".tp-head")
    twice = next(row for row in listed if "duplicates" in row["flags"])
    open_group(page, twice["gid"])
    assert "duplicate" in page.text(".tp-head")
