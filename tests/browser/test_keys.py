"""The keys, the focus and the addresses of the viewer in a real browser."""

from __future__ import annotations

import json

from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome, Page
from tests.browser.conftest import STEPS

NAMELESS = """
[...document.querySelectorAll('button, a[href], input, select, textarea, [role=img], [role=slider], [role=grid], img')]
  .filter(e => e.checkVisibility())
  .filter(e => !(e.ariaLabel || e.innerText.trim() || e.labels?.length || e.getAttribute('alt') || e.title))
  .map(e => e.outerHTML.slice(0, 200))
"""


def shown(page: Page, address: str) -> None:
    page.wait(
        f"location.hash.startsWith({json.dumps(address)}) && document.querySelectorAll('tr[aria-rowindex]').length > 0"
    )


def test_rows_are_walked_opened_and_left(page: Page) -> None:
    page.key("j")
    assert page.eval("document.activeElement.getAttribute('aria-rowindex')") == "2"
    page.key("j", "j", "k")
    assert page.eval("document.activeElement.getAttribute('aria-rowindex')") == "3"
    assert page.count("tr[tabindex='0']") == 1
    page.key("ArrowDown")
    assert page.eval("document.activeElement.getAttribute('aria-rowindex')") == "4"
    assert page.hash() == f"#/?at={STEPS - 3}"
    page.key("Enter")
    shown(page, f"#/step/{STEPS - 3}")
    page.wait("document.querySelector('h1').innerText.startsWith('Step')")
    page.key("j", "Enter")
    page.wait("location.hash.startsWith('#/group/')")
    page.wait("document.querySelectorAll('.crumbs li').length > 1")
    page.key("Escape")
    shown(page, "#/step/")
    page.key("Escape")
    shown(page, "#/")


def test_going_back_finds_the_place_again(page: Page) -> None:
    page.key("j", "j", "j", "j", "j", "j")
    before = page.eval("[scrollY, document.querySelector('[aria-current=true][tabindex]').innerText]")
    assert before[0] > 0
    page.key("Enter")
    shown(page, "#/step/")
    page.wait("document.querySelector('h1').innerText.startsWith('Step')")
    page.eval("history.back()")
    shown(page, "#/?at=")
    page.wait(f"scrollY === {before[0]}")
    assert page.eval("document.querySelector('[aria-current=true][tabindex]').innerText") == before[1]
    page.key("j")
    assert page.hash() == f"#/?at={STEPS - 7}"


def test_the_list_of_keys_is_that_of_the_page(page: Page, server: Server) -> None:
    page.key("?")
    overview = page.text("dialog")
    assert "open the step" in overview
    assert "peek" not in overview
    page.key("t")
    assert page.eval("document.documentElement.dataset.theme ?? ''") == ""
    page.key("Escape")
    page.wait("document.querySelectorAll('dialog').length === 0")
    assert page.hash() == "#/"
    page.goto(server.address + "/#/step/2")
    shown(page, "#/step/2")
    page.wait("document.querySelectorAll('.cells').length > 0")
    page.key("?")
    assert "preview" in page.text("dialog")
    assert "select two to compare" in page.text("dialog")
    page.click("dialog button")
    page.wait("document.querySelectorAll('dialog').length === 0")


def test_keys_do_nothing_while_somebody_types(page: Page, server: Server) -> None:
    page.goto(server.address + "/#/step/2")
    page.wait("document.querySelectorAll('.cells').length > 0")
    page.click(".filter-line input")
    page.key("j", "t", "?", "x", "*")
    assert page.eval("document.querySelector('.filter-line input').value") == "jt?x*"
    assert page.count("dialog") == 0
    assert page.count("[aria-selected=true]") == 0
    page.key("Escape", "Escape")
    assert page.eval("document.querySelector('.filter-line input').value") == ""
    assert page.eval("document.activeElement === document.body")
    assert page.hash() == "#/step/2"
    page.key("Escape")
    page.wait("location.hash === '#/'")


def test_buttons_keep_enter_and_space(page: Page) -> None:
    page.key("j")
    page.eval("document.querySelector('button[aria-label=\"Response length: table\"]').focus()")
    page.key("Enter")
    assert "tables=length" in page.hash()
    page.key(" ")
    assert "tables" not in page.hash()
    assert page.hash().startswith("#/?at=")


def test_tab_goes_through_the_page(page: Page) -> None:
    page.reload()
    page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 0")
    page.key("Tab")
    assert page.eval("document.activeElement.className") == "skip"
    page.key("Enter")
    assert page.eval("document.activeElement.id") == "main"
    seen = []
    for _ in range(60):
        page.key("Tab")
        seen.append(page.eval("document.activeElement.getAttribute('role') || document.activeElement.tagName"))
        if seen[-1] == "TR":
            break
    assert seen[-1] == "TR"
    assert "slider" in seen
    outline = page.eval("getComputedStyle(document.activeElement.cells[0]).boxShadow")
    assert outline != "none"


def test_everything_has_a_name_and_a_heading(page: Page, server: Server) -> None:
    for address in ("#/", "#/step/2", "#/step/2?view=samples", "#/samples"):
        page.goto(server.address + "/" + address)
        page.wait(f"location.hash === '{address}' && document.querySelectorAll('tr[aria-rowindex]').length > 0")
        page.wait("document.querySelectorAll('main h1').length === 1")
        assert page.eval(NAMELESS) == []
        assert page.eval("document.querySelectorAll('main, header').length") == 2
        assert page.eval("document.title").endswith("story · rollbook")


def test_news_are_announced(page: Page, server: Server) -> None:
    page.goto(server.address + "/#/step/2")
    page.wait("[...document.querySelectorAll('[aria-live]')].some(e => e.innerText.includes('Step 2'))")
    page.wait("document.querySelectorAll('.cells').length > 0")
    page.key("j", "x")
    page.wait("[...document.querySelectorAll('[aria-live]')].some(e => e.textContent.includes('1 selected'))")


def test_the_key_of_the_address_is_traded_and_dropped(chrome: Chrome, server: Server) -> None:
    page = chrome.page()
    page.goto(server.address + "/")
    assert "terminal" in page.wait("document.querySelector('.locked')?.innerText ?? ''")
    page.goto("about:blank")
    page.goto(server.address + "/#token=wrong")
    assert "terminal" in page.wait("document.querySelector('.locked')?.innerText ?? ''")
    assert "wrong" not in page.eval("location.href")
    page.goto("about:blank")
    page.goto(server.address + "/#/step/3?view=samples")
    page.wait("!!document.querySelector('.locked')")
    page.eval(f"void setTimeout(() => location.hash = '#token={server.token}')")  # the address, opened in the same tab
    page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 0")
    assert page.hash() == "#/step/3?view=samples"  # what was asked for
    assert server.token
    assert server.token not in page.eval("location.href + document.cookie + document.documentElement.innerText")
    assert all(server.token not in url for url in page.requests[1:])
    page.close()
