"""Token panes in a real browser: what is drawn, colored, copied, compared, forked, and under the pointer."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import unicodedata
from typing import Any

import numpy as np
import pytest

from rollbook.inspect import serialization
from rollbook.inspect.server import Server
from rollbook.inspect.trajectory import Trajectory
from tests.browser.chrome import Page

STRANGE = "5/2/1/0/s"
"""A sample with markup, bidi marks, zero widths, control characters, an emoji family and Chinese in it."""
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def document(server: Server, uid: str) -> Trajectory:
    """A sample as the server reads it."""
    return server.api.source.trajectories([uid])[0]  # type: ignore[union-attr]


def open_at(page: Page, address: str) -> None:
    """Go to an address of the app and wait until its tokens are there."""
    page.eval(f"location.hash = {json.dumps(address)}")
    page.wait("!!document.querySelector('.tk-pane .tk-chunk')")


def path(uid: str) -> str:
    return "#/t/" + uid.replace("/", "%2F")


def shown(sample: Trajectory, index: int, raw: bool = False) -> str:
    """What is drawn for a token: an independent statement of the rule."""
    text = sample.token(index)
    if sample.special[index] and not raw:
        return "‹" + text.strip("<|>") + "›"
    text = HIDDEN.sub(lambda match: f"⟦U+{ord(match[0]):04X}⟧", text)
    return text.replace("\n", "↵\n") if raw else text


def drawn(page: Page) -> str:
    """The text of all chunks, in order."""
    text: str = page.eval("[...document.querySelectorAll('.tk-chunk')].map(c => c.textContent).join('')")
    return text


PLACES = """(spans) => {
  const nodes = [];
  let length = 0;
  for (const chunk of document.querySelectorAll('.tk-chunk')) {
    const walker = document.createTreeWalker(chunk, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) { nodes.push([length, node]);
    length += node.length; }
  }
  const at = (place, end) => {
    for (let i = nodes.length - 1; i >= 0; i--) {
      const [start, node] = nodes[i];
      if (place > start || (!end && place === start)) return [node, place - start];
    }
  };
  return spans.map(([from, to]) => {
    const range = document.createRange();
    range.setStart(...at(from, false));
    range.setEnd(...at(to, true));
    const boxes = [...range.getClientRects()].filter(b => b.width > 0);
    const box = boxes[0];
    return box ? [box.left, box.right, (box.top + box.bottom) / 2] : null;
  });
}"""


def utf16(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


def spans(sample: Trajectory, raw: bool = False) -> list[tuple[int, int]]:
    """Where each token is drawn, in UTF-16 units of all that is drawn."""
    places, place = [], 0
    for index in range(sample.tokens):
        size = utf16(shown(sample, index, raw))
        places.append((place, place + size))
        place += size
    return places


def test_all_text_is_there_at_once_with_what_hides_written_out(page: Page, server: Server) -> None:
    sample = document(server, STRANGE)
    open_at(page, path(STRANGE))
    assert drawn(page) == "".join(shown(sample, index) for index in range(sample.tokens))
    text: str = page.eval("document.querySelector('.tk-pane').textContent")
    assert (
        "⟦U+202E⟧" in text and "⟦U+200B⟧" in text and "⟦U+001B⟧" in text and "<script>window.__pwn=1</script>" in text
    )
    assert not any(unicodedata.bidirectional(letter) in {"RLO", "LRO", "PDF", "RLE"} for letter in text)
    assert page.eval(
        "window.__pwn === undefined && document.querySelectorAll('.tk-pane script, .tk-pane img').length === 0"
    )
    page.key("r")
    page.wait("!!document.querySelector('.tk-raw')")
    assert drawn(page) == "".join(shown(sample, index, raw=True) for index in range(sample.tokens))


@pytest.mark.parametrize("raw", [False, True])
def test_the_token_under_the_pointer_is_the_one_that_is_drawn_there(page: Page, server: Server, raw: bool) -> None:
    sample = document(server, STRANGE)
    open_at(page, path(STRANGE) + ("?view=raw" if raw else ""))
    page.wait("document.querySelectorAll('.tk-chunk span').length > 20")
    places = page.eval(f"({PLACES})({json.dumps(spans(sample, raw))})")
    strange = {i for i in range(sample.tokens) if not sample.token(i).isascii() or HIDDEN.search(sample.token(i))}
    indices = {j for i in strange for j in (i - 1, i, i + 1)} | set(range(0, sample.tokens, 9))
    tried = 0
    for index in sorted(indices):
        if not 0 <= index < sample.tokens or places[index] is None or not shown(sample, index, raw).strip():
            continue
        left, right, y = places[index]
        for x in (left + 1, (left + right) / 2, right - 1):
            pointed = page.eval(
                "(() => { const pane = document.querySelector('.tk-pane');"
                f"pane.dispatchEvent(new PointerEvent('pointerdown', {{clientX: {x}, clientY: {y}, bubbles: true}}));"
                f"pane.dispatchEvent(new MouseEvent('click', {{clientX: {x}, clientY: {y}, bubbles: true}}));"
                "return new URLSearchParams(location.hash.split('?')[1]).get('at'); })()"
            )
            assert int(pointed) == index, (index, sample.token(index), x)
            tried += 1
    assert tried > 60
    index = next(i for i in sorted(strange) if places[i] is not None)
    left, right, y = page.eval(f"({PLACES})({json.dumps([spans(sample, raw)[index]])})")[0]
    page.click_at((left + right) / 2, y)  # and once with the mouse itself
    assert page.text(".ti-title").startswith(f"Token #{index} ")


def test_tokens_inside_a_character_are_reached_by_the_cursor(page: Page, server: Server) -> None:
    sample = document(server, STRANGE)
    inside = [i for i in range(1, sample.tokens) if sample.ends[i] == sample.ends[i - 1]]
    assert inside
    index = inside[0]
    complete = next(i for i in range(index, sample.tokens) if sample.ends[i] > sample.ends[i - 1])
    open_at(page, path(STRANGE) + f"?at={index - 1}")
    page.wait(f"document.querySelector('.ti-title')?.textContent.startsWith('Token #{index - 1} ')")
    page.key("l")
    assert page.text(".ti-title").startswith(f"Token #{index} ")
    assert "empty" in page.text(".ti-table") and shown(sample, complete) in page.text(".ti-table")
    marked = "[...CSS.highlights.get('%s')].map(range => range.toString())"
    assert page.eval(marked % "tk-part") == [shown(sample, complete)]
    for _ in range(complete - index):
        page.key("l")
    assert page.eval(marked % "tk-cursor") == [shown(sample, complete)] and page.eval(marked % "tk-part") == []


def bucket(value: float, scale: dict[str, Any], lens: str) -> str | None:
    """The class that a value's color has: written from the rule, not from the page's code."""
    if math.isnan(value):
        return None
    low, high = scale["low"], scale["high"]
    if lens == "logprob":
        value, low, high = -value, -high, -low
    number = math.floor(16 * (value - low) / (high - low))
    if scale["kind"] == "sequential":
        number = min(15, max(0, number))
        return None if number == 0 else f"tq-s{number}"
    number = min(15, max(0, number))
    return None if number in (7, 8) else f"tq-d{number}"


@pytest.mark.parametrize(("key", "lens"), [("1", "entropy"), ("2", "logprob"), ("6", "advantage")])
def test_colors_are_the_buckets_of_the_runs_scale(page: Page, server: Server, key: str, lens: str) -> None:
    uid = "1/4/1/0/s"
    sample = document(server, uid)
    scale = next(
        described["scale"]
        for described in page.eval("fetch('/api/run').then(r => r.json())")["lenses"]
        if described["id"] == lens
    )
    open_at(page, path(uid))
    page.key(key)
    page.wait(f"document.querySelector('.lens-button[aria-pressed=true]').textContent.startsWith('{key}')")
    letters = page.eval(
        "[...document.querySelectorAll('.tk-chunk')].flatMap(c => [...c.childNodes].flatMap(n => {"
        " const found = n.nodeType === 3 ? null : ([...n.classList].find(w => /^tq-[sd]\\d+$/.test(w)) ?? null);"
        " return Array.from({length: n.textContent.length}, () => found); }))"
    )
    values = sample.arrays[lens].astype(np.float64)
    edges = np.array([abs(16 * (abs(v) - scale["low"]) / (scale["high"] - scale["low"]) % 1) for v in values])
    compared = 0
    for index, (start, stop) in enumerate(spans(sample)):
        if 1e-4 < edges[index] < 1 - 1e-4 or math.isnan(values[index]):
            assert set(letters[start:stop]) <= {bucket(float(values[index]), scale, lens)}, (index, sample.token(index))
            compared += stop > start
    assert compared > 60


def test_what_is_copied_is_the_data(page: Page, server: Server) -> None:
    sample = document(server, STRANGE)
    open_at(page, path(STRANGE))
    start, stop = sample.prompt_tokens + 10, sample.tokens - 3
    places = spans(sample)
    copied = page.eval(
        f"""(() => {{
        const nodes = []; let length = 0;
        for (const chunk of document.querySelectorAll('.tk-chunk')) {{
          const walker = document.createTreeWalker(chunk, NodeFilter.SHOW_TEXT);
          for (let n = walker.nextNode(); n; n = walker.nextNode()) {{ nodes.push([length, n]); length += n.length; }}
        }}
        const at = (place) => {{ for (let i = nodes.length - 1; i >= 0;
        i--) if (place >= nodes[i][0]) return [nodes[i][1], place - nodes[i][0]]; }};
        const range = document.createRange();
        range.setStart(...at({places[start][0]})); range.setEnd(...at({places[stop][0]}));
        getSelection().removeAllRanges(); getSelection().addRange(range);
        const data = new DataTransfer();
        document.querySelector('.tk-pane').dispatchEvent(new ClipboardEvent('copy', {{clipboardData: data,
        bubbles: true}}));
        return data.getData('text/plain'); }})()"""
    )
    assert copied == "".join(sample.token(index) for index in range(start, stop))
    assert "\u202e" in copied


def test_frames_decode_to_the_same_numbers(page: Page, server: Server) -> None:
    sample = document(server, STRANGE)
    sample.text = "\ufeff" + sample.text
    sample.ends = sample.ends + 1
    for dtype in ("f4", "f2"):
        packed = base64.b64encode(serialization.encode([sample], dtype)).decode()
        decoded = page.eval(
            "import('/static/frame.js').then(({ decodeFrame }) => {"
            f"const one = decodeFrame(Uint8Array.from(atob('{packed}'), c => c.charCodeAt(0)).buffer)[0];"
            "return {text: one.text, ends: [...one.ends], ids: [...one.ids], flags: [...one.flags], uid: one.uid,"
            " entropy: [...one.arrays.entropy].map(x => Number.isNaN(x) ? null : x)}; })"
        )
        assert decoded["text"] == sample.text and decoded["uid"] == sample.uid
        assert decoded["ids"] == sample.ids.tolist()  # type: ignore[union-attr]
        assert decoded["flags"] == (sample.mask * 1 + sample.special * 2).tolist()
        assert decoded["ends"] == serialization.utf16_ends(sample.text, sample.ends).tolist()
        expected = sample.arrays["entropy"].astype(dtype.replace("f", "<f")).astype(float)
        assert decoded["entropy"] == [None if math.isnan(value) else value for value in expected]


LONG = """(async () => {
  const { TokenPane } = await import('/static/tokens.js');
  const n = %d;
  const ends = new Uint32Array(n); let text = '';
  const parts = [];
  for (let i = 0; i < n; i++) parts.push(i %% 40 === 39 ? '\\n' : ' w' + (i %% 10));
  text = parts.join('');
  let end = 0; for (let i = 0; i < n; i++) { end += parts[i].length; ends[i] = end; }
  const entropy = new Float32Array(n); for (let i = 0; i < n; i++) entropy[i] = (i * 7919 %% 1000) / 400;
  const trajectory = { text, ends, ids: null, flags: new Uint8Array(n).fill(1), versions: null,
  arrays: { entropy }, prompt_tokens: 0, pictures: [],
    segments: [{ role: 'assistant', kind: 'text', name: '', start: 0, stop: n, trained: true, turn: 0 }] };
  const lens = { id: 'entropy', label: 'Entropy', scale: { kind: 'sequential', low: 0, high: 2.5 } };
  const pane = new TokenPane({ trajectory, lens, scale: { kind: 'sequential', low: 0, high: 2.5, middle: null } });
  pane.element.style.setProperty('height', '400px');
  document.querySelector('#main').replaceChildren(pane.element);
  window.pane = pane;
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done, 20)));
  await frame(); await frame();
  %s
})()"""


def test_a_long_sample_has_few_elements_and_all_of_its_text(page: Page) -> None:
    measured = page.eval(
        LONG
        % (
            60_000,
            """const before = pane.element.querySelectorAll('*').length;
            const length = pane.body.textContent.length;
            pane.setCursor(51_234, 'center'); await frame(); await frame(); await frame();
            const box = [...CSS.highlights.get('tk-cursor')][0].getBoundingClientRect(),
            own = pane.element.getBoundingClientRect();
            return { before, after: pane.element.querySelectorAll('*').length, length, expected: text.length,
              seen: box.top >= own.top && box.bottom <= own.bottom, top: pane.topToken(),
              bottom: pane.bottomToken() };""",
        )
    )
    assert measured["length"] >= measured["expected"]
    assert measured["before"] < 3_000 and measured["after"] < 6_000
    assert measured["seen"] and measured["top"] < 51_234 < measured["bottom"]


def test_more_than_two_hundred_thousand_tokens_come_in_pages(page: Page) -> None:
    shown_pages = page.eval(
        LONG
        % (
            450_000,
            """const first = pane.body.querySelector('.tk-pager span').textContent;
            pane.setCursor(430_000, 'center'); await frame(); await frame();
            return { pages: pane.pages, first, last: pane.body.querySelector('.tk-pager span').textContent,
              marked: [...CSS.highlights.get('tk-cursor')].map(r => r.toString()) };""",
        )
    )
    assert shown_pages["pages"] == [[0, 200_000], [200_000, 400_000], [400_000, 450_000]]
    assert "page 1 of 3" in shown_pages["first"] and "page 3 of 3" in shown_pages["last"]
    assert shown_pages["marked"] == [" w0"]


def test_recoloring_fills_only_what_is_seen(page: Page) -> None:
    counts = page.eval(
        LONG
        % (
            60_000,
            """let filled = 0; const fill = pane.fill.bind(pane); pane.fill = (chunk) => { filled += 1; fill(chunk); };
            pane.setLens(null, null);
            const spans = pane.element.querySelectorAll('.tk-chunk span').length;
            return { filled, chunks: pane.chunks.length, spans };""",
        )
    )
    assert 0 < counts["filled"] < 20 < counts["chunks"] and counts["spans"] == 0


def lcs(a: list[int], b: list[int]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b):
            before, row[j + 1] = row[j + 1], before + 1 if x == y else max(row[j + 1], row[j])
    return row[-1]


def test_differences_cover_both_sides_and_are_the_least(page: Page) -> None:
    dice = random.Random(3)
    pairs = [
        ([dice.randrange(k) for _ in range(dice.randrange(12))], [dice.randrange(k) for _ in range(dice.randrange(12))])
        for k in (1, 2, 3, 5)
        for _ in range(60)
    ]
    differences = page.eval(
        f"import('/static/diff.js').then(({{ diffPieces }}) => {json.dumps(pairs)}.map(([a, b]) => diffPieces(a, b)))"
    )
    for (a, b), pieces in zip(pairs, differences, strict=True):
        x = y = same = 0
        for piece in pieces:
            assert piece["a"][0] == x and piece["b"][0] == y
            x, y = piece["a"][1], piece["b"][1]
            if piece["same"]:
                assert a[slice(*piece["a"])] == b[slice(*piece["b"])]
                same += x - piece["a"][0]
        assert (x, y) == (len(a), len(b)) and same == lcs(a, b)


def test_differences_of_long_texts_come_in_time(page: Page) -> None:
    measurements = page.eval(
        """import('/static/diff.js').then(({ diffPieces }) => {
        let seed = 1; const next = (n) => { seed = (seed * 48271) % 2147483647; return seed % n; };
        return [[50000, 5], [50000, 100], [3, 100], [400, 40], [0, 5]].map(([kinds, edits]) => {
          const a = Array.from({ length: 32768 }, (_, i) => (kinds ? next(kinds) : i % 7)); // the last: one loop
          const b = a.flatMap((x) => (next(100) < edits ? (next(2) ? [next(kinds || 9)] : []) : [x]));
          const start = performance.now();
          const pieces = diffPieces(a, b);
          return { took: performance.now() - start, sound: pieces.every((p) => !p.same || a.slice(...p.a).every((x,
          i) => x === b[p.b[0] + i])),
            same: pieces.reduce((sum, p) => sum + (p.same ? p.a[1] - p.a[0] : 0), 0) };
        }); })"""
    )
    assert all(measured["took"] < 5_000 and measured["sound"] for measured in measurements)
    assert (
        measurements[0]["same"] > 0.9 * 32_768
        and measurements[3]["same"] > 0.4 * 32_768
        and measurements[4]["same"] > 0.5 * 32_768
    )


def test_the_fork_tree_parts_samples_where_their_tokens_part(page: Page) -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [1, 2, 7], [1, 2]]
    grown = page.eval(
        "import('/static/tree.js').then(({ forkTree }) => {"
        f"const made = forkTree({json.dumps(rows)}.map(ids => ({{ ids, prompt_tokens: 0, ends: ids.map((_, i) "
        f"=> i + 1), text: 'x'.repeat(ids.length), arrays: {{}} }})));"
        "const plain = n => [n.start, n.stop, n.samples, n.children.map(plain)]; return [plain(made.root), "
        "made.nodes, made.cut]; })"
    )
    tree = [
        0,
        2,
        [0, 1, 2, 3, 4],
        [[2, 3, [0, 1], [[3, 4, [0], []], [3, 5, [1], []]]], [2, 3, [2, 3], []], [2, 2, [4], []]],
    ]
    assert grown == [tree, 6, 0]


def test_a_wide_fork_tree_is_cut_and_says_so(page: Page) -> None:
    dice = random.Random(5)
    rows = [[1, *(dice.randrange(3) for _ in range(12))] for _ in range(64)]
    counts = page.eval(
        "import('/static/tree.js').then(({ forkTree }) => {"
        f"const rows = {json.dumps(rows)}.map(ids => ({{ ids, prompt_tokens: 0, ends: ids.map((_, i) => i + "
        f"1), text: 'x'.repeat(ids.length), arrays: {{}} }}));"
        "const all = forkTree(rows, Infinity), some = forkTree(rows); return [some.nodes, some.cut, "
        "all.nodes, all.cut]; })"
    )
    assert counts[0] <= 40 and counts[1] > 0 and counts[2] > 64 and counts[3] == 0
