"""Characters that reorder, hide or control, on every page where text shows: they are written out as ⟦U+XXXX⟧."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import rollbook
from rollbook.inspect.html_export import write_html
from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome, Page
from tests.browser.conftest import measured
from tests.browser.hostile import go, record
from tests.viewer import story

# Between letters, so that a run of them can be told apart, and so that no page trims them away.
HIDDEN = (
    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200b\u200c\u200d\u200e\u200f\ufeff"
    "\x01\x07\x1b\x7f\x85\x9f\u2028\u00ad\u061c"
)
SAID = "x" + "".join(f"{char}y" for char in HIDDEN)
WRITTEN = "x" + "".join(f"⟦U+{ord(char):04X}⟧y" for char in HIDDEN)
NAME = "a\u202eb\u200bc"
NAMED = "a⟦U+202E⟧b⟦U+200B⟧c"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")

# All that a reader, an eye or an ear, gets of a page: texts, names, tips, choices, what boxes hold.
TEXTS = """(() => {
  const found = [document.title];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) if (!walk.currentNode.parentElement.closest('script')) found.push(walk.currentNode.data);
  for (const node of document.body.querySelectorAll('*'))
    for (const { name, value } of node.attributes)
      if (/^(title|alt|placeholder|label|aria-.*)$/.test(name)) found.push(value);
  return found.join('\\n');
})()"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("bidi") / NAME
    with rollbook.open(path, tokenizer=story.tokenizer()) as book:
        for step in (0, 1, 2):
            book.append([record(step, NAME, run, SAID + str(run), [NAME, SAID], 2) for run in range(2)])
        book.drop([f"0/{NAME}/1/0/s"], NAME)
    with Server(path, port=0) as started:
        yield measured(started)


def check(page: Page, *expected: str) -> None:
    """Nothing on the page hides or reorders, and what is expected stands there in full."""
    text = page.eval(TEXTS)
    for bad in FORBIDDEN.finditer(text):
        raise AssertionError(
            f"U+{ord(bad[0]):04X} in {text[max(0, bad.start() - 80) : bad.end() + 80]!r} at {page.hash()}"
        )
    for escaped in expected:
        assert escaped in text, (escaped, page.hash())


GROUP = quote(f"1/{NAME}", safe="")
ONE = quote(f"0/{NAME}/1/0/s", safe="")


def test_control_a_page_that_shows_them_is_noticed(page: Page) -> None:
    page.eval("document.querySelector('main').append('\\u202e')")
    with pytest.raises(AssertionError, match=r"U\+202E"):
        check(page)
    page.eval("document.querySelector('main').lastChild.remove()")
    check(page)


@pytest.mark.parametrize(
    ("address", "ready", "expected"),
    [
        ("#/", "tr[aria-rowindex]", [NAMED]),
        ("#/?part=*", ".chart-note .key-line", [NAMED]),
        ("#/step/1", "tr[aria-rowindex]", [NAMED]),
        ("#/step/1?view=samples", "tr[aria-rowindex]", [NAMED]),
        ("#/samples", "tr[aria-rowindex]", [NAMED]),
        ("#/samples?view=groups", "tr[aria-rowindex]", [NAMED]),
        (f"#/group/{GROUP}", ".tk-chunk", [WRITTEN, NAMED]),
        (f"#/t/{ONE}", ".tk-chunk", [WRITTEN, NAMED]),
        (f"#/t/{ONE}?view=raw", ".tk-chunk", [WRITTEN]),
        (f"#/t/{ONE}?view=json", ".tp-left .json", [WRITTEN, NAMED]),
        (f"#/t/{ONE}?view=ledger", ".ledger-line", [NAMED]),
        ("#/compare?a=0-1&b=2-2", ".compare-plots svg", [NAMED]),
        (f"#/search?mode=substring&q={quote(HIDDEN[4] + 'y')}", ".hit", ["⟦U+202E⟧y", NAMED]),
        (f"#/nowhere{quote(NAME)}", ".failure", [NAMED]),
        (f"#/t/{quote('9/' + NAME, safe='')}", ".failure", [NAMED]),
    ],
)
def test_pages_write_them_out(page: Page, address: str, ready: str, expected: list[str]) -> None:
    go(page, address, ready)
    if "view=json" in address:
        page.eval("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    check(page, *expected)
    page.wait_until_idle()
    page.problems[:] = [problem for problem in page.problems if "status of 40" not in problem]


def test_the_prompt_page_and_its_difference_write_them_out(page: Page, server: Server) -> None:
    prompt = server.api.answers.list(view="samples")["rows"][0]["prompt"]  # type: ignore[union-attr]
    go(page, f"#/prompt/{prompt}", ".diff-view")
    check(page, "⟦U+202E⟧", NAMED)
    page.eval("document.querySelector('.diff-fold').click()")
    check(page)
    assert WRITTEN in page.eval("document.querySelector('.diff-view').textContent")


def test_rows_of_sql_write_them_out(page: Page) -> None:
    query = f"select uid, response_text as \"{NAME}\", info from experiences where uid = '0/{NAME}/1/0/s'"
    go(page, "#/sql?q=" + quote(query), ".sql-box")
    page.click(".sql-edit .primary")
    page.wait("document.querySelectorAll('.plain-grid tbody tr').length > 0")
    page.eval("document.querySelectorAll('.sql-long').forEach(b => b.click())")
    check(page, WRITTEN, NAMED)


def test_the_export_writes_them_out(chrome: Chrome, server: Server, tmp_path: Path) -> None:
    api = server.api
    write_html(tmp_path / "out.html", api.source, api.answers, gid=f"1/{NAME}", title=NAME)  # type: ignore[union-attr]
    page = chrome.page()
    page.offline()
    page.goto((tmp_path / "out.html").as_uri())
    page.wait("!!document.querySelector('.tk-chunk')")
    check(page, WRITTEN, NAMED)
    page.close()
