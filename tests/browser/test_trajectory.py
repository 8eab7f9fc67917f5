"""The page of a trajectory in a real browser: lenses, cursor, views, folds, masks, pictures, strips, addresses."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rollbook
from rollbook import EID, Experience
from rollbook.inspect.server import Server
from rollbook.rollout import Prompt, Sample
from tests.browser.chrome import Chrome, Page
from tests.browser.conftest import measured
from tests.browser.test_tokens import document, drawn, open_at, path
from tests.viewer import story

TOOLS = "1/4/1/0/s"
"""A sample with a picture, a tool call and two turns."""
CHANGED = "3/13/1/0/s"
"""A sample that a newer policy went on with after its tool's answer."""


def params(page: Page) -> dict[str, str]:
    parameters: dict[str, str] = page.eval("Object.fromEntries(new URLSearchParams(location.hash.split('?')[1] ?? ''))")
    return parameters


def cursor(page: Page) -> int:
    return int(params(page)["at"])


def test_the_head_says_what_the_record_says(page: Page, server: Server) -> None:
    sample = document(server, TOOLS)
    open_at(page, path(TOOLS))
    head = page.text(".tp-head")
    assert (
        sample.uid in head
        and f"{sample.tokens - sample.prompt_tokens} tokens" in head
        and f"+ {sample.prompt_tokens} prompt" in head
    )
    assert f"accuracy {sample.parts['accuracy']:.2f}".replace("0.00", "0") in head
    assert page.text(".crumbs").split() == ["step", "1", "group", "4", "sample", "#1"]
    roles = [role.lower() for role in page.texts(".tk-role-name")]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert page.texts(".tk-kind-name") == ["image", "thinking", "tool call", "tool result"]
    assert page.text(".tk-tool-name") == "calculator"
    badges = page.texts(".tk-role .tk-badge")
    assert badges.count("masked") == 3  # system, user, tool


def test_keys_walk_tokens_peaks_and_turns(page: Page, server: Server) -> None:
    sample = document(server, TOOLS)
    open_at(page, path(TOOLS) + "?at=70")
    page.wait("document.querySelector('.ti-title')?.textContent.startsWith('Token #70 ')")
    page.key("l", "l", "h")
    assert cursor(page) == 71
    page.key("ArrowRight")
    assert cursor(page) == 72 and page.text(".ti-title").startswith("Token #72 ")
    assert page.text(".ti-row:has(dt) dd") == str(sample.ids[72])  # type: ignore[index]
    spoken = page.text("[aria-live=polite].sr")
    assert spoken.startswith(f"token 72 of {sample.tokens}, '{sample.token(72)}', Entropy ") and "percentile" in spoken
    page.key("]")
    high = cursor(page)
    scale = next(
        described["scale"]
        for described in page.eval("fetch('/api/run').then(r => r.json())")["lenses"]
        if described["id"] == "entropy"
    )
    line = 0.75 * scale["high"]
    assert sample.arrays["entropy"][high] >= line - 1e-4 and high == next(
        i for i in range(73, sample.tokens) if sample.arrays["entropy"][i] >= line
    )
    page.key("]", "[")
    assert cursor(page) == high
    starts = [segment.start for segment in sample.segments]
    turns = [
        start
        for start, (a, b) in zip(starts[1:], zip(sample.segments, sample.segments[1:], strict=False), strict=True)
        if (a.role, a.turn) != (b.role, b.turn)
    ]
    open_at(page, path(TOOLS) + "?at=0")
    page.wait("document.querySelector('.ti-title')?.textContent.startsWith('Token #0 ')")
    seen = []
    for _ in range(4):
        page.key("}")
        seen.append(cursor(page))
    assert seen == sorted(seen) and set(seen) <= set(turns) and len(set(seen)) == 4
    page.key("{")
    assert cursor(page) == seen[-2]


def test_the_inspector_has_the_tokens_numbers(page: Page, server: Server) -> None:
    sample = document(server, TOOLS)
    index = sample.prompt_tokens + 12
    open_at(page, path(TOOLS) + f"?at={index}")
    page.wait("!!document.querySelector('.ti-table')")
    rows = dict(
        page.eval(
            "[...document.querySelectorAll('.ti-row')].map(r => [r.children[0].textContent, "
            "r.children[1].firstChild.textContent])"
        )
    )
    for label, name in (
        ("Entropy", "entropy"),
        ("Log-prob", "logprob"),
        ("Importance", "ratio"),
        ("Advantage", "advantage"),
    ):
        shown = float(rows[label].replace("−", "-"))
        assert shown == pytest.approx(float(sample.arrays[name][index]), rel=0.06, abs=6e-4), label
    assert rows["mask"] == "trained on" and rows["bytes"] == sample.token(index).encode().hex(" ")
    page.eval("document.querySelectorAll('.ti-choice')[0].click()")
    order = page.eval("[...document.querySelectorAll('.ti-list li')].map(e => Number(e.dataset.token))")
    values = np.nan_to_num(sample.arrays["entropy"], nan=-math.inf)
    assert order == sorted(np.argsort(-values, kind="stable")[: len(order)].tolist(), key=lambda i: -values[i])
    page.eval("document.querySelector('.ti-item').focus()")
    page.key("Enter")
    assert cursor(page) == order[0]


def test_lenses_by_key_with_their_domain_and_pins(page: Page, server: Server) -> None:
    open_at(page, path(TOOLS))
    page.key("6")
    assert params(page)["lens"] == "advantage" and page.count(".tk-chunk [class*=tq-d]") > 3
    page.key("0")
    assert params(page)["lens"] == "off" and page.count(".tk-chunk [class*=tq-]") == 0
    page.key("1")
    colored = page.count(".tk-chunk [class*=tq-s]")
    page.click(".lens-ramp + .lens-end")
    page.key("Control+a")
    page.type("40")
    page.key("Enter")
    page.wait("location.hash.includes('hi=40')")
    assert page.count(".tk-chunk [class*=tq-s]") < colored / 4
    page.click(".lens-unpin")
    page.wait("!location.hash.includes('hi=')")
    assert page.count(".tk-chunk [class*=tq-s]") == colored
    missing = page.eval("[...document.querySelectorAll('.lens-button')].filter(b => b.disabled).map(b => b.title)")
    assert all("not recorded" in title for title in missing)


def test_masks_three_ways(page: Page) -> None:
    open_at(page, path(TOOLS))
    style = "getComputedStyle(document.querySelector('.tk-chunk.tk-masked'))"
    look = f"(() => {{ const s = {style}; return [s.color, s.backgroundImage]; }})()"
    plain = page.eval("getComputedStyle(document.querySelector('.tk-pane')).color")
    dim = page.eval(look)
    assert dim[0] != plain and dim[1] == "none"
    page.key("m")
    hatch = page.eval(look)
    assert hatch[0] == plain and "gradient" in hatch[1] and params(page)["mask"] == "hatch"
    page.key("m")
    assert page.eval(look) == [plain, "none"] and params(page)["mask"] == "off"
    page.key("m")
    assert page.eval(look) == dim and "mask" not in params(page)


def test_views_raw_json_and_ledger(page: Page, server: Server) -> None:
    sample = document(server, TOOLS)
    open_at(page, path(TOOLS))
    assert "‹im_start›" in drawn(page)
    page.key("r")
    assert (
        params(page)["view"] == "raw" and "<|im_start|>" in drawn(page) and drawn(page).replace("↵", "") == sample.text
    )
    assert page.count(".tk-raw .tk-chunk > span") >= sample.tokens // 2
    page.key("J")
    page.wait("!!document.querySelector('.tp-view .json-key')")
    assert "reward" in page.text(".tp-view .json") and page.eval(
        "document.querySelectorAll('.tp-view .json details').length > 3"
    )
    page.eval("[...document.querySelectorAll('.segmented button')].find(b => b.textContent === 'Ledger').click()")
    page.wait("!!document.querySelector('.ledger-line')")
    kinds = page.texts(".ledger-kind")
    assert kinds[0] == "admitted" and "trained" in kinds and params(page)["view"] == "ledger"


def test_a_deep_link_restores_all_of_it(page: Page, server: Server) -> None:
    address = path(TOOLS) + "?lens=mismatch&lo=-0.5&hi=0.5&mask=hatch&at=80&fold=1&zoom=60-120&view=raw"
    open_at(page, address)
    page.wait("document.querySelector('.ti-title')?.textContent.startsWith('Token #80 ')")
    before = page.eval("location.hash")
    assert params(page) == {
        "lens": "mismatch",
        "lo": "-0.5",
        "hi": "0.5",
        "mask": "hatch",
        "at": "80",
        "fold": "1",
        "zoom": "60-120",
        "view": "raw",
    }
    state = (
        "[document.querySelector('.lens-button[aria-pressed=true]').textContent, "
        "document.querySelector('.tk-pane').dataset.mask,"
        " document.querySelectorAll('.tk-raw').length, [...document.querySelectorAll('.lens-end')].map(e => e.value),"
        " document.querySelector('.curve-note').textContent]"
    )
    page.wait("document.querySelector('.curve-note').textContent !== ''")
    restored = page.eval(state)
    assert restored == ["3Mismatch", "hatch", 1, ["-0.5", "0.5"], "tokens 60–119"]
    page.reload()
    page.wait("document.querySelector('.curve-note')?.textContent.startsWith('tokens 60')")
    page.wait("document.querySelector('.ti-title')?.textContent.startsWith('Token #80 ')")
    assert page.eval(state) == restored and page.eval("location.hash") == before


def test_folds_are_kept_and_open_where_the_cursor_goes(page: Page) -> None:
    open_at(page, path(TOOLS))
    hidden = "document.querySelectorAll('.tk-text')[3].getAttribute('hidden')"
    assert page.eval(hidden) is None
    page.eval("document.querySelectorAll('.tk-kind .tk-fold')[1].click()")  # thinking
    folded = params(page)["fold"]
    assert page.count(".tk-text[hidden='until-found']") == 1
    assert "<think>" in drawn(page)  # the text is still there for the browser's own search
    page.reload()
    page.wait("document.querySelectorAll(\".tk-text[hidden='until-found']\").length === 1")
    assert params(page)["fold"] == folded
    page.eval(
        "document.querySelector(\".tk-text[hidden='until-found']\").dispatchEvent(new Event('beforematch', "
        "{bubbles: true}))"
    )
    assert page.count(".tk-text[hidden='until-found']") == 0 and "fold" not in params(page)


def test_strip_and_curve_lead_into_the_text(page: Page, server: Server) -> None:
    sample = document(server, TOOLS)
    page.viewport(1440, 620)
    open_at(page, path(TOOLS))
    box = page.box(".tp-strips .strip")
    page.click_at(box["x"] + box["width"] - 4, box["y"] + 9)
    page.wait("document.querySelector('.tk-pane').scrollTop > 20")
    view = page.eval("document.querySelector('.tp-strips .strip').getAttribute('aria-valuetext')")
    assert view.startswith("tokens ")
    curve = page.box(".curve-canvas")
    y = curve["y"] + 20
    page.drag((curve["x"] + curve["width"] * 0.5, y), (curve["x"] + curve["width"] * 0.75, y))
    page.wait("location.hash.includes('zoom=')")
    start, stop = (int(number) for number in params(page)["zoom"].split("-"))
    assert abs(start - sample.tokens * 0.5) <= 2 and abs(stop - sample.tokens * 0.75) <= 2
    page.click_at(curve["x"] + 3, y)
    assert cursor(page) == start
    page.click(".curve-whole")
    page.wait("!location.hash.includes('zoom=')")


def test_pictures_are_shown_and_enlarged(page: Page, server: Server) -> None:
    open_at(page, path(TOOLS))
    page.wait("document.querySelector('.tk-figure img')?.complete")
    picture = page.eval(
        "(() => { const i = document.querySelector('.tk-figure img'); return [i.naturalWidth, "
        "i.naturalHeight, i.getAttribute('src')]; })()"
    )
    name = hashlib.sha256(story.picture(4)).hexdigest()
    assert picture == [160, 100, f"api/media/{name}"]
    page.click(".tk-figure")
    assert page.count("dialog.tk-zoom[open]") == 1
    page.key("Escape")
    page.wait("document.querySelectorAll('dialog').length === 0")


def test_a_policy_that_changed_on_the_way_is_marked(page: Page, server: Server) -> None:
    sample = document(server, CHANGED)
    assert sample.versions is not None
    sampled = [i for i in range(sample.tokens) if sample.versions[i] >= 0]
    places = [b for a, b in pairwise(sampled) if sample.versions[a] != sample.versions[b]]
    assert len(places) == 1
    versions = sorted({int(version) for version in sample.versions if version >= 0})
    assert len(versions) == 2
    open_at(page, path(CHANGED))
    assert f"policy v{versions[0]}→v{versions[1]}" in page.text(".tp-head")
    marks = page.eval(
        "[...document.querySelectorAll('.tk-version')].map(e => [e.dataset.version, getComputedStyle(e, "
        "'::before').content])"
    )
    assert marks == [[f"v{sample.versions[i]}", f'"v{sample.versions[i]}"'] for i in places]


def test_samples_and_groups_are_one_key_away(page: Page, server: Server) -> None:
    around = page.eval("fetch('/api/neighbors?uid=' + encodeURIComponent('1/4/1/0/s')).then(r => r.json())")
    open_at(page, path(TOOLS) + "?lens=kl")
    page.key("j")
    page.wait(f"location.hash.startsWith({json.dumps(path(around['next']))})")
    page.wait("!!document.querySelector('.tk-pane')")
    assert params(page)["lens"] == "kl"
    page.key("k")
    page.wait(f"location.hash.startsWith({json.dumps(path(TOOLS))})")
    page.wait("!!document.querySelector('.tk-pane')")
    page.key("*")
    assert page.eval("document.querySelector('.tp-head [aria-label=star]').getAttribute('aria-pressed')") == "true"
    page.key("*", "d")
    page.wait("document.querySelectorAll('dialog[open] .ti-item').length === 3")
    page.click("dialog[open] .ti-item")
    page.wait("location.hash.startsWith('#/group/1%2F4?diff=')")
    page.wait("!!document.querySelector('.diff-view')")


def test_escape_goes_up_to_the_group(page: Page) -> None:
    open_at(page, path(TOOLS))
    page.key("Escape")
    page.wait("location.hash.startsWith('#/group/1%2F4')")
    page.wait("document.querySelectorAll('.gp-column').length === 4")


def test_words_that_were_searched_for_are_marked(page: Page, server: Server) -> None:
    sample = document(server, TOOLS)
    open_at(page, path(TOOLS) + "?q=boxes")
    page.wait("CSS.highlights.has('tk-hit') && [...CSS.highlights.get('tk-hit')].length > 0")
    assert set(page.eval("[...CSS.highlights.get('tk-hit')].map(r => r.toString())")) == {"boxes"}
    assert page.eval("[...CSS.highlights.get('tk-hit')].length") == sample.text.count("boxes")
    page.key("n")
    assert sample.text[: sample.ends[cursor(page)]].count("boxes") == 1
    page.key("5")  # a mark outlives new colors
    assert page.eval("[...CSS.highlights.get('tk-hit')].map(r => r.toString()).join()") == ",".join(
        ["boxes"] * sample.text.count("boxes")
    )


@pytest.fixture(scope="module")
def pair_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A preference pair, in a book that knows no tokenizer."""
    folder: Path = tmp_path_factory.mktemp("odd") / "book"
    texts = ("Two and two?", "Therefore we get 4.", "So the answer is 5, I think.")
    prompt, better, worse = (np.array(story.tokenizer().encode(text).ids, np.int32) for text in texts)
    with rollbook.open(folder) as book:
        eid = EID(batch=1, task=1, run=0, suffix="p")
        book.append([Experience(eid=eid, tokens=prompt, experience_type="dpo", chosen=better, rejected=worse)])
    with Server(folder) as started:
        yield measured(started)


def test_a_pair_stands_side_by_side_and_says_that_no_tokenizer_is_known(chrome: Chrome, pair_server: Server) -> None:
    page = chrome.page()
    page.goto(pair_server.url)
    page.wait("!!document.querySelector('#main')")
    uid = page.eval("fetch('/api/list?view=samples').then(r => r.json())")["rows"][0]["uid"]
    sample = document(pair_server, uid)
    assert sample.rejected is not None
    open_at(page, path(uid))
    assert page.count(".tp-pair .tk-pane") == 2
    heads = page.texts(".tp-side-head")
    assert heads[0].startswith("Chosen") and heads[1].startswith("Rejected")
    assert "--tokenizer" in page.text(".tp-notice")
    sides = page.eval(
        "[...document.querySelectorAll('.tp-pair .tk-pane')].map(p => "
        "[...p.querySelectorAll('.tk-chunk')].map(c => c.textContent).join(''))"
    )
    ids = [int(id_) for id_ in sample.rejected.ids]  # type: ignore[union-attr]
    assert all(str(id_) in sides[1] for id_ in ids) and sides[0] != sides[1]
    page.eval("location.hash = '#/group/' + encodeURIComponent(" + json.dumps(sample.gid) + ")")
    page.wait("document.querySelectorAll('.gp-column').length === 2")
    assert [head.split()[1] for head in page.texts(".gp-column-head a")] == ["chosen", "rejected"]
    assert page.problems == []
    page.close()


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A sample of a prompt with four pictures, from tiny to large."""
    folder: Path = tmp_path_factory.mktemp("drawings") / "book"
    images = [Image.effect_noise(size, 60) for size in SIZES]
    ids = story.tokenizer().encode("Which of these? Therefore we get 4.").ids
    sample = Sample(
        prompt=Prompt(text="Which of these?", images=images),
        eid=EID(1, 1, 0, suffix="i"),
        prompt_ids=ids[:3],
        response_ids=ids[3:],
    )
    with rollbook.open(folder) as book:
        book.append([sample.to_experience()])
    with Server(folder) as started:
        yield measured(started)


SIZES = [(8, 8), (60, 40), (200, 12), (300, 180)]


def test_a_small_picture_is_drawn_large_enough_to_see(chrome: Chrome, drawings: Server) -> None:
    page = chrome.page()
    page.goto(drawings.url)
    page.wait("!!document.querySelector('#main h1')")
    open_at(page, path("1/1/0/0/i"))
    look = (
        "[...document.querySelectorAll('.tk-figure')].map(f => { const i = f.querySelector('img'); const n = "
        "f.querySelector('.tk-figure-note').getBoundingClientRect(); const b = i.getBoundingClientRect(); return "
        "[Math.round(b.width), Math.round(b.height), getComputedStyle(i).imageRendering, n.top >= b.bottom - 1]; })"
    )
    page.wait("[...document.querySelectorAll('.tk-figure img')].every(i => i.complete)")
    assert page.eval(look) == [
        [96, 96, "pixelated", True],  # each point is a square, and the size stands below
        [120, 80, "pixelated", True],
        [200, 12, "auto", True],
        [300, 180, "auto", False],
    ]
    page.click(".tk-figure")
    page.wait("getComputedStyle(document.querySelector('dialog.tk-zoom img')).imageRendering === 'pixelated'")
    page.key("Escape")
    page.wait("document.querySelectorAll('dialog').length === 0")
    page.eval("document.querySelectorAll('.tk-figure')[3].click()")
    page.wait("document.querySelector('dialog.tk-zoom img')?.complete")
    assert page.eval("getComputedStyle(document.querySelector('dialog.tk-zoom img')).imageRendering") == "auto"
    page.key("Escape")
    open_at(page, path("1/1/0/0/i") + "?view=raw")
    page.wait("document.querySelectorAll('.tk-raw .tk-figure').length === 4")  # each once, though none has a place
    assert page.problems == []
    page.close()
