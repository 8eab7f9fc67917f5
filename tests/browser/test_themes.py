"""Themes and palettes in a real browser: texts can be read, charts follow, the system is obeyed."""

from __future__ import annotations

from typing import Any

import pytest

from rollbook.inspect.server import Server
from tests.browser.chrome import Page

# The contrast of each text against what is really behind it, transparent grounds laid over each other.
CONTRAST = """
(() => {
  const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const read = (color) => {
    pen.clearRect(0, 0, 1, 1); pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const ground = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) {
      const color = read(getComputedStyle(at).backgroundColor);
      if (color[3]) layers.push(color);
      if (color[3] === 255) break;
    }
    const lay = (under, over) => under.map((u, i) => u + (over[i] - u) * over[3] / 255);
    return layers.reverse().reduce(lay, [255, 255, 255]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const bad = [];
  let seen = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !node.checkVisibility() || node.closest('.sr, .skip, option')) continue;
    seen += 1;
    const [a, b] = [light(read(getComputedStyle(node).color).slice(0, 3)), light(ground(node))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) bad.push([node.className, walk.currentNode.textContent.trim().slice(0, 40), contrast]);
  }
  return {seen, bad};
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_can_be_read(page: Page, server: Server, dark: bool) -> None:
    page.media(dark=dark)
    for address in ("#/", "#/step/3", "#/step/3?view=samples"):
        page.goto(server.address + "/" + address)
        page.wait(f"location.hash === '{address}' && document.querySelectorAll('tr[aria-rowindex]').length > 0")
        page.wait("document.querySelectorAll('main h1').length === 1")
        if address != "#/":
            page.key("j", "x", " ")
            page.wait(
                "!!document.querySelector('.peek') && document.querySelectorAll('[aria-selected=true]').length === 1"
            )
        contrast: dict[str, Any] = page.eval(CONTRAST)
        assert contrast["seen"] > 60
        assert contrast["bad"] == []


def test_the_theme_follows_the_system_until_somebody_chooses(page: Page) -> None:
    ground = "getComputedStyle(document.body.parentElement).backgroundColor"
    page.media(dark=False)
    light = page.eval(ground)
    page.media(dark=True)
    dark = page.eval(ground)
    assert light != dark
    page.key("t")
    assert page.eval("document.documentElement.dataset.theme") == "light"
    assert page.eval(ground) == light
    page.reload()
    page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 0")
    assert page.eval(ground) == light
    page.key("t")
    page.media(dark=False)
    assert page.eval(ground) == dark
    page.key("t")
    assert page.eval(ground) == light
    assert page.eval("document.documentElement.dataset.theme ?? 'none'") == "none"


def test_charts_are_drawn_in_the_colors_of_the_theme(page: Page) -> None:
    picture = (
        "(async () => { await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)));"
        "return document.querySelector('.chart-box canvas').toDataURL(); })()"
    )
    before = page.eval(picture)
    page.key("t", "t")
    assert page.eval("document.documentElement.dataset.theme") == "dark"
    assert page.eval(picture) != before


def test_the_safe_palette_changes_the_scales(page: Page) -> None:
    scale = "getComputedStyle(document.documentElement).getPropertyValue('--div-0')"
    before = page.eval(scale)
    page.key("c")
    assert page.eval(scale) != before
    assert page.eval("document.querySelector('[aria-label=\"Color-blind-safe palette\"]').ariaPressed") == "true"
    page.reload()
    page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 0")
    assert page.eval("document.documentElement.dataset.palette") == "safe"


def test_nothing_moves_for_who_asks_for_calm(page: Page) -> None:
    assert page.eval("document.querySelector('.live .dot').getAnimations().length") == 1
    page.media(prefers_reduced_motion="reduce")
    assert page.eval("document.getAnimations().length") == 0


def test_forced_colors_keep_what_colors_said(page: Page, server: Server) -> None:
    page.media(forced_colors="active")
    page.goto(server.address + "/#/step/3")
    page.wait("document.querySelectorAll('.cell').length > 0")
    page.key("j")
    assert page.eval("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    filled = (
        "[...document.querySelectorAll('.cell i')]"
        ".map(i => [i.getBoundingClientRect().height > 0, getComputedStyle(i).backgroundColor])"
    )
    shown = [color for tall, color in page.eval(filled) if tall]
    assert shown
    assert all(color == "rgb(0, 0, 0)" for color in shown)


def test_a_narrow_window_needs_no_scrolling_sideways(page: Page, server: Server) -> None:
    for width in (1024, 700):
        page.viewport(width, 700)
        for address in ("#/", "#/step/3", "#/samples"):
            page.goto(server.address + "/" + address)
            page.wait(f"location.hash === '{address}' && document.querySelectorAll('tr[aria-rowindex]').length > 0")
            assert page.eval("document.documentElement.scrollWidth") <= width
            ends = page.eval(
                "[document.querySelector('table.grid'), [...document.querySelectorAll('.grid th')]"
                ".filter(h => h.checkVisibility()).pop()].map(e => Math.round(e.getBoundingClientRect().right))"
            )
            assert ends[0] == ends[1]
