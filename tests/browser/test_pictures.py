"""The pictures of the documentation, made from the story: real renderings, and rewritten in docs/ only when asked for
(ROLLBOOK_PICTURES=1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome
from tests.browser.conftest import measured
from tests.viewer import story

DOCS = Path(__file__).parents[2] / "docs" / "pictures"
WRITES = os.environ.get("ROLLBOOK_PICTURES") == "1"
GROUP, SAMPLE = "20/1", "20/1/0/0/s"
PICTURES = {
    "overview": ("#/", "tr[aria-rowindex]", ["Reward", "Findings", "Entropy"], False),
    "step": ("#/step/20", "tr[aria-rowindex]", ["Step 20", "Length × reward"], False),
    "group": (f"#/group/{quote(GROUP, safe='')}?lens=entropy", ".tk-chunk", ["Fork tree", "Strips"], False),
    "trajectory": (f"#/t/{quote(SAMPLE, safe='')}?lens=entropy&at=80", ".tk-chunk", ["Token #80", "calculator"], False),
    "compare": ("#/compare?a=0-5&b=18-23", ".compare-plots svg", ["Newly solved", "clear change"], False),
    "dark": (f"#/t/{quote(SAMPLE, safe='')}?lens=logprob&at=80", ".tk-chunk", ["Token #80"], True),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The whole story for the documentation; else as much of it as shows what the pictures show."""
    groups, runs = (6, 8) if WRITES else (3, 4)
    path = story.make(tmp_path_factory.mktemp("pictures") / "arithmetic", groups=groups, runs=runs)
    with Server(path, port=0) as started:
        yield measured(started)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_a_real_rendering(chrome: Chrome, server: Server, tmp_path: Path, name: str) -> None:
    address, ready, words, dark = PICTURES[name]
    page = chrome.page(1440, 900, dark=dark)
    page.goto(server.url)
    page.wait("!!document.querySelector('#main h1')")
    page.eval(f"location.hash = '{address}'")
    page.wait(
        f"!!document.querySelector('{ready}') && document.querySelector('#main').getAttribute('aria-busy') !== 'true'"
    )
    if "at=80" in address:
        page.wait("document.querySelector('.ti-title')?.innerText.startsWith('Token #80')")
    page.eval(
        "document.fonts.ready.then(() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => "
        "setTimeout(r, 150)))))"
    )
    folder = DOCS if WRITES else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    file = page.screenshot(folder / f"{name}.png")
    text = page.text()
    for word in words:
        assert word.lower() in text.lower()
    assert page.problems == []
    page.close()
    with Image.open(file) as opened:
        picture = opened.convert("RGB")
    assert picture.size == (1440, 900)
    colors = picture.getcolors(1 << 20)
    assert colors is not None and len(colors) > 200  # text is smoothed, curves and lenses have colors
    share, ground = max((count, color) for count, color in colors if isinstance(color, tuple))
    assert share < 0.97 * 1440 * 900
    assert (sum(ground) < 200) is dark  # the ground is dark, or it is light
    grey = np.asarray(picture.convert("L"), np.int64)
    for box in (
        (0, 0, 1440, 60),
        (0, 60, 1440, 480),
        (0, 480, 1440, 900),
    ):  # something stands in the head, above, below
        left, top, right, bottom = box
        assert np.ptp(grey[top:bottom, left:right]) > 100, box
