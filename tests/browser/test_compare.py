"""Steps against steps in a real browser: distributions, phrases and prompts as the records say; a drag leads there."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from rollbook.inspect.server import Server
from tests.browser.chrome import Page
from tests.browser.conftest import GROUPS, RUNS, STEPS
from tests.viewer import story

A, B = (0, 4), (5, 9)


@pytest.fixture(scope="module")
def sides() -> list[list[Any]]:
    return [
        [row for step in range(first, last + 1) for row in story.rollout(step, GROUPS, RUNS)] for first, last in (A, B)
    ]


def show(page: Page, address: str = "#/compare?a=0-4&b=5-9") -> None:
    page.eval(f"location.hash = {json.dumps(address)}")
    page.wait("!!document.querySelector('.compare-plots figure svg')")


def rows(page: Page, section: str) -> list[list[str]]:
    cells: list[list[str]] = page.eval(
        f"[...document.querySelectorAll('section[aria-label=\"{section}\"] tbody tr')].map(r => [...r.cells]"
        ".map(c => c.innerText.trim().replaceAll('−', '-')))"
    )
    return cells


def test_distributions_are_counted_and_said_in_words(page: Page, sides: list[list[Any]]) -> None:
    show(page)
    size = (A[1] - A[0] + 1) * GROUPS * RUNS
    assert f"A: {size} samples in {size // RUNS} groups · B: {size} samples" in page.text(".compare-form")
    titles = page.texts(".compare-plots h2")
    assert titles[:3] == ["Reward", "Response length", "Entropy"]
    page.click("button[aria-label='Response length: table']")
    table = page.eval(
        "[...document.querySelectorAll('.compare-plots .chart-table:not([hidden]) tbody tr')].map(r => [...r.cells]"
        ".map(c => c.innerText))"
    )
    lengths = [[len(row.tokens) - row.prompt_length for row in side] for side in sides]
    assert [sum(int(row[column]) for row in table) for column in (2, 3)] == [
        len(side_lengths) for side_lengths in lengths
    ]
    low, high = min(map(min, lengths)), max(map(max, lengths))
    edges = np.linspace(low, high, len(table) + 1)
    for column, side in ((2, lengths[0]), (3, lengths[1])):
        assert [int(row[column]) for row in table] == np.histogram(side, edges)[0].tolist()
    shifts = {row[0]: row for row in rows(page, "Shifts")}
    for name, values in (("Reward", [[row.reward for row in side] for side in sides]), ("Response length", lengths)):
        means = [float(np.nanmean(side_values)) for side_values in values]
        assert [float(cell.split(" ± ")[0]) for cell in shifts[name][1:3]] == pytest.approx(means, rel=0.02, abs=6e-4)
    words = page.texts(".compare-words")
    assert all(
        re.search(r"(clear change|no clear change|change)\s+KS \d\.\d\d, p [<=] 0?\.?\d", sentence)
        for sentence in words
    ), words


def test_prompts_newly_solved_are_those_of_the_records(page: Page, sides: list[list[Any]]) -> None:
    show(page)
    bar = page.eval("fetch('api/compare?a=0-4&b=5-9').then(r => r.json()).then(r => r.prompts.solved_from)")
    tags: list[dict[int, int]] = []
    for side in sides:
        solved = defaultdict(list)
        for row in side:
            if np.isfinite(row.reward):
                solved[int(row.eid.task)].append(row.reward >= bar)
        tags.append({task: int(any(right)) + int(all(right)) for task, right in solved.items()})
    for section, low, high in (("Newly solved", tags[0], tags[1]), ("Newly broken", tags[1], tags[0])):
        expected = sorted(story.question(task)[0][:20] for task in low.keys() & high.keys() if low[task] < high[task])
        assert sorted(row[0][:20] for row in rows(page, section)) == expected
        assert page.text(f"section[aria-label='{section}'] .panel-head .muted").startswith(f"{len(expected)} prompt")
    assert rows(page, "Newly solved")
    page.click("section[aria-label='Newly solved'] tbody a")
    page.wait("location.hash.startsWith('#/prompt/') && !!document.querySelector('.diff-view')")


def test_phrases_drift_with_their_correlation_and_lead_to_texts(
    page: Page, sides: list[list[Any]], server: Server
) -> None:
    show(page, "#/compare?a=0-4&b=8-11")
    by_phrase = {row[0]: row for row in rows(page, "Phrases")}
    answer = server.api.answers.compare((0, 4), (8, 11))  # type: ignore[union-attr]
    assert list(by_phrase) == [entry["phrase"] for entry in answer["phrases"]] and by_phrase
    for entry in answer["phrases"]:
        row = by_phrase[entry["phrase"]]
        assert row[2] == f"{100 * entry['share_a']:.0f}%" or "." in row[2]
        assert row[5].lstrip("+") == (
            "–" if entry["reward"] is None else f"{entry['reward']:.2f}".replace("-0.00", "0.00")
        )
    page.eval("document.querySelector('section[aria-label=Phrases] .segmented button:nth-child(2)').click()")
    assert [row[0] for row in rows(page, "Phrases")] == [
        entry["phrase"] for entry in answer["phrases"] if entry["z"] > 0
    ]
    assert "phrases=more" in page.hash()
    phrase = rows(page, "Phrases")[0][0]
    page.eval("document.querySelector('section[aria-label=Phrases] tbody tr td:last-child a').click()")
    page.wait("!!document.querySelector('.tk-pane .tk-chunk') && CSS.highlights.size > 0")
    assert phrase in re.sub(r"[^\w' ]", "", page.text(".tk-pane").lower().replace("\n", " "))
    page.eval("history.back()")
    page.wait("!!document.querySelector('section[aria-label=Phrases] tbody a')")
    page.click("section[aria-label=Phrases] tbody a")
    page.wait("location.hash.startsWith('#/search') && document.querySelectorAll('.hit').length > 0")


def test_spans_are_typed_swapped_and_dragged(page: Page) -> None:
    show(page)
    page.key("s")
    page.wait("location.hash.startsWith('#/compare?a=5-9&b=0-4')")
    page.eval("document.querySelector('[aria-label=\"Steps of A\"]').focus()")
    page.key("Control+a")
    page.type("nothing")
    page.key("Enter")
    assert "Expected a step" in page.text(".compare-form [role=status]")
    page.key("Control+a")
    page.type("3")
    page.key("Enter")
    page.wait("location.hash.startsWith('#/compare?a=3-3&b=0-4')")
    page.wait("!!document.querySelector('.compare-strip svg')")
    page.wait("!!document.querySelector('.compare-plots figure svg')")
    box = page.box(".compare-strip")

    def at(step: int) -> float:
        return box["x"] + 44 + (box["width"] - 56) * step / (STEPS - 1)

    page.drag((at(6), box["y"] + 40), (at(8), box["y"] + 40))
    page.wait("location.hash.startsWith('#/compare?a=6-8&b=0-4')")
    page.wait("document.querySelector('.compare-pick [aria-pressed=true]')?.innerText === 'B'")
    box = page.box(".compare-strip")
    page.drag((at(11), box["y"] + 40), (at(10), box["y"] + 40))
    page.wait("location.hash.startsWith('#/compare?a=6-8&b=10-11')")


def test_a_drag_on_the_overview_compares_two_steps(page: Page) -> None:
    box = page.box(".chart-hit")

    def at(step: int) -> float:
        return box["x"] + 40 + (box["width"] - 50) * step / (STEPS - 1)

    page.drag((at(2), box["y"] + 50), (at(9), box["y"] + 50))
    page.wait("location.hash === '#/compare?a=2-2&b=9-9' && !!document.querySelector('.compare-plots figure svg')")
    assert page.eval("document.querySelector('[aria-label=\"Steps of B\"]').value") == "9-9"
    assert f"A: {GROUPS * RUNS} samples" in page.text(".compare-form")


def test_bars_are_read_with_the_keys_and_nothing_is_asked_twice(page: Page, server: Server) -> None:
    show(page)
    page.eval("document.querySelector('.compare-plots .plot').focus()")
    page.key("End")
    spoken = page.eval("document.activeElement.getAttribute('aria-valuetext')")
    assert re.search(r"A [\d.]+% \(\d+\), B [\d.]+% \(\d+\)", spoken) and spoken == page.text(
        ".compare-plots .chart-now"
    )
    answers = server.api.answers  # type: ignore[union-attr]
    assert answers.compare(A, B) is answers.compare(A, B)  # worked out once


def test_steps_without_samples_say_so(page: Page) -> None:
    page.eval("location.hash = '#/compare?a=0-1&b=900'")
    page.wait(
        "document.querySelector('.compare-form ~ .page .empty-title')?.innerText.startsWith('No samples in B, "
        "step 900')"
    )
