"""The SQL page in a real browser: nothing runs by itself, rows are those of the book, and what they hold is text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from rollbook.inspect.server import Server
from tests.browser.chrome import Page
from tests.browser.conftest import GROUPS, RUNS, STEPS


def open_sql(page: Page, query: str | None = None) -> None:
    page.eval(f"location.hash = {json.dumps('#/sql' + ('' if query is None else '?q=' + quote(query)))}")
    page.wait("!!document.querySelector('.sql-box') && document.title.startsWith('SQL')")
    if query is not None:
        page.wait(f"document.querySelector('.sql-box').value === {json.dumps(query)}")


def run(page: Page, query: str) -> None:
    """Put a query into the box and run it with the keys."""
    open_sql(page, query)
    page.eval("document.querySelector('.sql-box').focus()")
    page.key("Control+Enter")
    page.wait(
        "!document.querySelector('.sql-edit .primary').disabled && (!!document.querySelector('.sql-result table, "
        ".sql-error') || document.querySelector('.sql-result').innerText.includes('No rows'))"
    )


def cells(page: Page) -> list[list[str]]:
    texts: list[list[str]] = page.eval(
        "[...document.querySelectorAll('.plain-grid tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    return texts


def test_an_address_brings_a_query_and_does_not_run_it(page: Page) -> None:
    open_sql(page, "select 'hello' as greeting")
    assert page.eval("document.querySelector('.sql-box').value") == "select 'hello' as greeting"
    assert "has not run" in page.text(".sql-result")
    page.reload()
    page.wait("!!document.querySelector('.sql-box')")
    assert not [url for url in page.requests if "/api/sql" in url]
    page.click(".sql-edit .primary")
    page.wait("document.querySelectorAll('.plain-grid tbody tr').length === 1")
    assert page.texts(".plain-grid th") == ["greeting"] and cells(page) == [["hello"]]
    assert len([url for url in page.requests if "/api/sql" in url]) == 1


def test_every_example_and_every_table_can_be_asked(page: Page, server: Server) -> None:
    open_sql(page)
    examples = page.eval("[...document.querySelectorAll('.sql-examples button')].map(b => b.title)")
    tables = page.texts(".sql-table")
    assert len(examples) >= 5 and "experiences" in tables
    for i, query in enumerate(examples):
        page.eval(f"document.querySelectorAll('.sql-examples button')[{i}].click()")
        assert page.eval("document.querySelector('.sql-box').value") == query
        answer = server.api.workers.sql(query)  # type: ignore[union-attr]
        assert answer["columns"], query
    for i, name in enumerate(tables):
        page.eval(f"document.querySelectorAll('.sql-table')[{i}].click()")
        assert server.api.workers.sql(page.eval("document.querySelector('.sql-box').value"))["rows"], name  # type: ignore[union-attr]
    assert not [url for url in page.requests if "/api/sql" in url]  # written into the box, not run


def test_rows_are_those_of_the_book_and_lead_to_pages(page: Page) -> None:
    run(
        page,
        "select uid, gid, tid, run, reward is null as none from "
        "experiences where batch = '2' and not evaluation order by uid",
    )
    rows = cells(page)
    assert len(rows) == GROUPS * RUNS and f"{GROUPS * RUNS} rows" in page.text(".sql-panel .panel-head")
    assert rows[0][0].startswith("2/") and rows[0][1] == rows[0][2] == "/".join(rows[0][0].split("/")[:2])
    page.click(".plain-grid tbody tr:nth-child(2) td:nth-child(2) a")
    page.wait(f"location.hash === {json.dumps('#/group/' + quote(rows[1][1], safe=''))}")
    page.eval("history.back()")
    page.wait("!!document.querySelector('.sql-box')")
    run(page, "select uid from experiences where batch = '2' and not evaluation order by uid")
    page.click(".plain-grid tbody tr:first-child td a")
    page.wait("!!document.querySelector('.tk-pane .tk-chunk')")
    assert page.hash() == "#/t/" + quote(rows[0][0], safe="")


def test_an_error_is_shown_and_what_writes_is_refused(page: Page) -> None:
    run(page, "select nonsense from experiences")
    assert "nonsense" in page.text(".sql-error")
    for query in ("delete from experiences", "copy (select 1) to 'x.csv'", "attach 'x.db'", "select 1; select 2"):
        run(page, query)
        assert page.text(".sql-error"), query
    page.wait_until_idle()
    assert page.problems and all("/api/sql" in problem for problem in page.problems)
    page.problems.clear()


def test_many_rows_come_in_pieces_and_no_more_than_ten_thousand(page: Page) -> None:
    run(page, "select i, i * 2 as twice from range(25000) t(i)")
    assert "1,000 rows (truncated)" in page.text(".sql-panel .panel-head")
    assert page.count(".plain-grid tbody tr") < 1000  # made as the reader scrolls
    for _ in range(8):
        page.eval("(() => { const r = document.querySelector('.sql-result'); r.scrollTop = r.scrollHeight; })()")
        time.sleep(0.05)
    page.wait("document.querySelectorAll('.plain-grid tbody tr').length === 1000")
    assert cells(page)[-1] == ["999", "1998"]
    page.eval("[...document.querySelectorAll('.sql-panel button')].find(b => b.innerText.startsWith('Up to')).click()")
    page.wait("document.querySelector('.sql-panel .panel-head').innerText.includes('10,000 rows (truncated)')")


def test_csv_has_no_cell_that_a_spreadsheet_would_run(page: Page, tmp_path: Path) -> None:
    page.chrome.call(
        "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), browserContextId=page._context
    )
    run(page, """select '=1+1' as "=head", '+2' as b, '-3' as c, '@x' as d, 'a,"b"' as e, -0.5 as f, null as g""")
    page.eval("[...document.querySelectorAll('.sql-panel button')].find(b => b.innerText === 'CSV').click()")
    end = time.monotonic() + 20
    while not (tmp_path / "rollbook.csv").exists() and time.monotonic() < end:
        time.sleep(0.02)
    saved = (tmp_path / "rollbook.csv").read_text()
    assert [line.replace('"', "~") for line in saved.splitlines()] == [
        "'=head,b,c,d,e,f,g",
        "'=1+1,'+2,'-3,'@x,~a,~~b~~~,-0.5,",
    ]


def test_long_cells_open_and_recent_queries_come_back(page: Page) -> None:
    run(page, "select repeat('word ', 500) as long, [1, 2, 3] as list, 'two\nlines' as lines")
    row = cells(page)[0]
    assert row[0].endswith("…") and len(row[0]) < 300 and row[1] == "[1,2,3]" and row[2] == "two lines"
    page.click(".sql-long")
    assert page.eval("document.querySelector('.sql-long').textContent") == "word " * 500
    assert page.eval("document.querySelector('.sql-long').getAttribute('aria-expanded')") == "true"
    open_sql(page, "select 2")
    page.eval(
        "(() => { const s = document.querySelector('.sql-recent'); s.value = '0'; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert "repeat('word ', 500)" in page.eval("document.querySelector('.sql-box').value")
    assert "repeat" in page.hash()


def test_a_query_that_takes_too_long_is_stopped(page: Page, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.api, "seconds", 0.5)
    run(page, "select count(*) from range(100000000) a, range(100000000) b where a.range + b.range = 7")
    assert "0.5 seconds" in page.text(".sql-error") or "time" in page.text(".sql-error")
    page.wait_until_idle()
    assert STEPS and all("/api/sql" in problem for problem in page.problems)
    page.problems.clear()
