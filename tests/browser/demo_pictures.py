"""The pictures of the demo's run in the documentation: `make demo`, then `python -m tests.browser.demo_pictures`."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

import rollbook
from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome

DOCS = Path(__file__).parents[2] / "docs" / "pictures"
QUESTION = """select tid from experiences where batch = '30' and not evaluation group by tid
    having sum(reward) between 3 and 5 order by tid limit 1"""
"""A group of a step in the middle that is half right."""


def main(run: str = "runs/letters") -> None:
    """Write them, of a run's folder."""
    with rollbook.open(Path(run) / "book", mode="r") as book:
        ((group,),) = book.sql(QUESTION).rows()
    pages = {
        "demo-overview": "#/",
        "demo-group": f"#/group/{quote(str(group), safe='')}?lens=entropy",
        "demo-compare": "#/compare?a=1-10&b=111-120",
        "demo-metrics": "#/metrics",
    }
    with Server(run, port=0) as server, Chrome() as chrome:
        page = chrome.page(1440, 900)
        page.goto(server.url)
        page.wait("!!document.querySelector('#main h1')")
        page.wait("!document.body.innerText.includes('reading ')", timeout=300)
        for name, address in pages.items():
            page.eval(f"location.hash = '{address}'")
            page.wait("document.querySelector('#main').getAttribute('aria-busy') !== 'true'")
            page.eval("new Promise(done => setTimeout(done, 4000))")
            print(page.screenshot(DOCS / f"{name}.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
