"""The page of metrics: what the trainer logged, found by name, read by pointer and as a table, and followed live."""

from __future__ import annotations

from pathlib import Path

import rollbook
from rollbook.inspect.server import Server
from tests.browser.chrome import Chrome, Page
from tests.browser.conftest import GROUPS, RUNS, measured
from tests.viewer import story

TITLES = "[...document.querySelectorAll('#main figure.chart h2')].map(e => e.innerText)"


def chart(title: str) -> str:
    return (
        f"[...document.querySelectorAll('#main figure.chart')].find(f => f.querySelector('h2').innerText === '{title}')"
    )


def now(page: Page, title: str) -> str:
    return str(page.eval(chart(title) + ".querySelector('.chart-now').innerText")).replace("\u00a0", " ")


def test_everything_that_was_logged_is_drawn_found_and_followed(chrome: Chrome, tmp_path: Path) -> None:
    path = story.make(tmp_path / "run", steps=3, groups=GROUPS, runs=RUNS)
    with rollbook.open(path, tokenizer=story.tokenizer()) as book, Server(path, port=0) as server:
        for step in range(1, 31):
            book.log(step, {"loss": 1 / step, "grad_norm": float("nan") if step == 30 else 2.0, "lr": 1e-4 * step})
            book.log(step, {f"policy/{name}": step for name in ("pg_loss", "ppo_kl", "tokens")})
        for step, share in ((0, 0.2), (30, 0.875)):
            book.log(step, {"eval/avg@1": share, "eval/avg@1/low": share - 0.0625, "eval/avg@1/high": share + 0.0625})
        measured(server)
        page = chrome.page()
        page.goto(server.url)
        page.wait("document.querySelectorAll('tr[aria-rowindex]').length > 0")
        page.click("nav.pages a[href='#/metrics']")
        page.wait(TITLES + ".length === 4")
        assert page.eval(TITLES) == ["loss", "grad_norm", "lr", "eval/avg@1"]  # an interval's ends are no charts
        assert page.texts(".metrics-section > summary h2") == ["Training", "Evaluation", "policy"]
        assert [now(page, name).split()[:3] for name in ("loss", "grad_norm", "lr")] == [
            ["step", "30", "0.03333"],
            ["step", "30", "NaN"],
            ["step", "30", "0.003"],
        ]
        assert "0.875" in now(page, "eval/avg@1") and "0.8125 – 0.9375" in now(page, "eval/avg@1")
        painted = "e => e.getContext('2d').getImageData(0, 0, e.width, e.height).data.some(v => v > 0)"
        assert page.eval(f"[...document.querySelectorAll('#main figure.chart canvas')].every({painted})")
        page.eval(
            f"(() => {{ const hit = {chart('loss')}.querySelector('.chart-hit'), box = hit.getBoundingClientRect();"
            "hit.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 41, clientY: box.top + 9})); })()"
        )
        page.wait(chart("lr") + ".querySelector('.chart-now').innerText.includes('step 1 ')")  # all show the same step
        assert now(page, "loss").split() == ["step", "1", "1"] and now(page, "lr").split() == ["step", "1", "1e−4"]
        page.eval(chart("eval/avg@1") + ".querySelector('button[aria-pressed]').click()")
        table = chart("eval/avg@1") + ".querySelectorAll('tr')"
        assert page.eval(f"[...{table}].map(r => r.innerText.split('\\t'))") == [
            ["step", "value", "low", "high"],
            ["30", "0.875", "0.8125", "0.9375"],
            ["0", "0.2", "0.1375", "0.2625"],
        ]
        page.eval("document.querySelector('input[type=search][aria-label=\"Search names\"]').focus()")
        page.type("pol KL")
        page.wait(TITLES + ".length === 1")
        assert page.eval(TITLES) == ["policy/ppo_kl"] and "q=pol" in page.hash()
        page.reload()
        page.wait(TITLES + ".join() === 'policy/ppo_kl'")
        page.requests.clear()
        book.log(31, {"policy/ppo_kl": 99.5})  # nothing else of the run changes
        page.wait(chart("policy/ppo_kl") + ".querySelector('.chart-now').innerText.includes('99.5')")
        assert any("/api/metrics?since=30" in url for url in page.requests)
        assert page.problems == []
        page.close()
